// Records the kernel images that a process loads, and the driver calls that load them: a callback of CUPTI (cupti_callbacks.h, CUDA 12 and 13).
//
// The callback for a load runs no Python.  It runs inside a driver call, which may hold a lock of the driver.  If it waited for the GIL,
// and the thread that holds the GIL waited for the driver's lock, both would wait forever.  torch's static launcher loads kernels while
// it holds the GIL.  Only `node_created` is Python.

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace {

enum { DRIVER_API = 1, RESOURCE = 3 };                // CUpti_CallbackDomain
enum { MODULE_LOADED = 6, GRAPHNODE_CREATED = 13 };  // CUpti_CallbackIdResource
enum { ENTER = 0 };                                  // CUpti_ApiCallbackSite

struct CallbackData { int site; const char *function; const char *params; const int *result; };
struct ResourceData { void *context, *handle; const void *descriptor; };
struct ModuleData { uint32_t id; size_t bytes; const void *image; };
struct GraphData { void *graph, *original, *node; };

// Where a driver call's parameters hold a handle: `at` bytes from their start, or behind the pointer there.
struct Holder { const char *name; uint32_t at, indirect; };

// One image.  `holder`: the index of the call's Holder, or -1.  Images of one call have one `serial`.
struct Load {
    Load *next;
    const char *call;
    uint64_t serial, handle, bytes;
    int64_t holder;
    int depth;
    unsigned char image[1];
};

struct Log {
    const Holder *holders;
    int64_t count;
    void (*node_created)(void *node);
    pthread_mutex_t lock;
    uint64_t calls;
    Load *first, *last;
};

thread_local int depth = 0;            // driver calls of this thread that have not returned
thread_local Load *pending = nullptr;  // images that these calls have loaded, the newest first

// Whether a call is `name`, or a variant of it: cuModuleLoadData_v2, cuLaunchKernel_ptsz.
bool is_variant(const char *call, const char *name) {
    size_t length = strlen(name);
    if (strncmp(call, name, length)) return false;
    call += length;
    if (!strncmp(call, "_v2", 3)) call += 3;
    return !*call || !strcmp(call, "_ptsz");
}

void find_handle(const Log *log, Load *load, const char *params) {
    for (int64_t index = 0; index < log->count && load->holder < 0; ++index) {
        if (!is_variant(load->call, log->holders[index].name)) continue;
        uint64_t value;
        memcpy(&value, params + log->holders[index].at, sizeof value);
        if (log->holders[index].indirect && value) memcpy(&value, (const void *)value, sizeof value);
        load->handle = value;
        load->holder = index;
    }
}

// Adds loads to the log in the order in which they happened.  `newest`: linked from the newest to the oldest.
void publish(Log *log, Load *newest) {
    Load *oldest = nullptr;
    while (newest) {
        Load *next = newest->next;
        newest->next = oldest;
        oldest = newest;
        newest = next;
    }
    pthread_mutex_lock(&log->lock);
    uint64_t serial = log->calls++;
    Load *last = oldest;
    for (Load *load = oldest; load; load = load->next) {
        load->serial = serial;
        last = load;
    }
    // atomic, because readers take no lock
    __atomic_store_n(log->last ? &log->last->next : &log->first, oldest, __ATOMIC_RELEASE);
    log->last = last;
    pthread_mutex_unlock(&log->lock);
}

void on_return(Log *log, const CallbackData *data) {
    if (!depth) return;  // the call began before the subscription
    --depth;
    Load *mine = nullptr;
    bool failed = data->result && *data->result;
    for (Load **end = &mine; pending && pending->depth > depth;) {
        Load *load = pending;
        pending = load->next;
        load->next = nullptr;
        if (failed) {
            free(load);
            continue;
        }
        load->call = strdup(data->function);
        find_handle(log, load, data->params);
        *end = load;
        end = &load->next;
    }
    if (mine) publish(log, mine);
}

void on_load(Log *log, const ModuleData *module) {
    Load *load = (Load *)calloc(1, sizeof(Load) + module->bytes);
    if (!load) abort();
    memcpy(load->image, module->image, module->bytes);
    load->bytes = module->bytes;
    load->holder = -1;
    load->depth = depth;
    load->next = depth ? pending : nullptr;
    if (depth) {
        pending = load;
    } else {
        load->call = "no driver call";
        publish(log, load);
    }
}

}  // namespace

extern "C" {

Log *new_log(const Holder *holders, int64_t count, void (*node_created)(void *)) {
    Log *log = (Log *)calloc(1, sizeof(Log));
    if (!log) abort();
    log->holders = holders;
    log->count = count;
    log->node_created = node_created;
    pthread_mutex_init(&log->lock, nullptr);
    return log;
}

// The first load; the others follow by `next`.
const Load *first_load(const Log *log) { return log->first; }

// The callback of CUPTI.
void on_event(Log *log, int domain, uint32_t number, const void *data) {
    if (domain == DRIVER_API) {
        const CallbackData *call = (const CallbackData *)data;
        if (call->site == ENTER) {
            ++depth;
        } else {
            on_return(log, call);
        }
    } else if (domain == RESOURCE) {
        const void *descriptor = ((const ResourceData *)data)->descriptor;
        if (number == MODULE_LOADED) {
            on_load(log, (const ModuleData *)descriptor);
        } else if (number == GRAPHNODE_CREATED && log->node_created && ((const GraphData *)descriptor)->node) {
            log->node_created(((const GraphData *)descriptor)->node);
        }
    }
}
}
