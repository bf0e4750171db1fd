/* A CUDA driver that writes down what it is given, compiled against the real cuda.h: a symbol, type or member that cuda.h has
   otherwise does not compile.  Answers are numbers that no call gives. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static char text[1 << 16];
static CUgraph bodies[2] = {(CUgraph)(0xB0D1ull << 32), (CUgraph)(0xB0D2ull << 32)};
static CUgraphNode nodes[2] = {(CUgraphNode)(0x10Dull << 36), (CUgraphNode)(0x10Eull << 36)};
static CUgraphEdgeData edges[2];

const char *take(void);
const char *take(void) { static char last[1 << 16]; strcpy(last, text); text[0] = 0; return last; }

static CUresult say(const char *format, ...) {
    va_list list;
    va_start(list, format);
    size_t used = strlen(text);
    vsnprintf(text + used, sizeof text - used, format, list);
    va_end(list);
    return CUDA_SUCCESS;
}
#define P(x) (unsigned long long)(x)
#define HANDLE(out, kind) (*(out) = (kind)(0xABCDull << 32))

CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *out) { *out = 12040; return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult e, const char **out) { *out = e == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : 0; return e == 719 ? 0 : CUDA_ERROR_INVALID_VALUE; }
CUresult cuDeviceGetCount(int *out) { *out = 3; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *out, int i) { *out = i + 5; return CUDA_SUCCESS; }
CUresult cuDeviceGetName(char *name, int n, CUdevice d) { strncpy(name, "a GPU", n); return say("%d %d", n, d); }
CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute a, CUdevice d) {
    *out = (a == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) * 90 + (a == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) * 4 + d;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice d) { HANDLE(out, CUcontext); return say("%d", d); }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) { return say("%d", d); }
CUresult cuCtxPushCurrent_v2(CUcontext c) { return say("%llx", P(c)); }
CUresult cuCtxPopCurrent_v2(CUcontext *out) { return say("%llx", P(out)); }
CUresult cuCtxSynchronize(void) { return say("-"); }
CUresult cuMemGetInfo_v2(size_t *free, size_t *total) { *free = 5ull << 33; *total = 9ull << 33; return CUDA_SUCCESS; }
CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t n) { HANDLE(out, CUdeviceptr); return say("%zx", n); }
CUresult cuMemFree_v2(CUdeviceptr a) { return say("%llx", P(a)); }
CUresult cuMemAllocAsync(CUdeviceptr *out, size_t n, CUstream s) { HANDLE(out, CUdeviceptr); return say("%zx %llx", n, P(s)); }
CUresult cuMemFreeAsync(CUdeviceptr a, CUstream s) { return say("%llx %llx", P(a), P(s)); }
CUresult cuMemAddressReserve(CUdeviceptr *out, size_t n, size_t alignment, CUdeviceptr wish, unsigned long long flags) { HANDLE(out, CUdeviceptr); return say("%zx %zx %llx %llu", n, alignment, P(wish), flags); }
CUresult cuMemAddressFree(CUdeviceptr a, size_t n) { return say("%llx %zx", P(a), n); }
CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t n, const CUmemAllocationProp *p, unsigned long long flags) {
    HANDLE(out, CUmemGenericAllocationHandle);
    return say("%zx %d %d %d %d %llu", n, p->type == CU_MEM_ALLOCATION_TYPE_PINNED, p->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        p->location.type == CU_MEM_LOCATION_TYPE_DEVICE, p->location.id, flags);
}
CUresult cuMemRelease(CUmemGenericAllocationHandle h) { return say("%llx", P(h)); }
CUresult cuMemMap(CUdeviceptr a, size_t n, size_t offset, CUmemGenericAllocationHandle h, unsigned long long flags) { return say("%llx %zx %zx %llx %llu", P(a), n, offset, P(h), flags); }
CUresult cuMemUnmap(CUdeviceptr a, size_t n) { return say("%llx %zx", P(a), n); }
CUresult cuMemSetAccess(CUdeviceptr a, size_t n, const CUmemAccessDesc *d, size_t count) {
    return say("%llx %zx %d %d %d %zu", P(a), n, d->location.type == CU_MEM_LOCATION_TYPE_DEVICE, d->location.id, d->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, count);
}
CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle h, CUmemAllocationHandleType type, unsigned long long flags) {
    *(int *)out = 33;
    return say("%llx %d %llu", P(h), type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, flags);
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags) {
    HANDLE(out, CUdeviceptr);
    return say("%s %u", handle.reserved, flags);
}
CUresult cuIpcCloseMemHandle(CUdeviceptr a) { return say("%llx", a); }
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *file, CUmemAllocationHandleType type) {
    HANDLE(out, CUmemGenericAllocationHandle);
    return say("%llx %d", P(file), type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t n, CUstream s) { return say("%llx %llx %llx %llx %zx %llx", P(to), P(there), P(from), P(here), n, P(s)); }
CUresult cuCtxEnablePeerAccess(CUcontext c, unsigned flags) { return say("%llx %u", P(c), flags); }
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute a, CUdeviceptr p) {
    *(CUmemorytype *)out = CU_MEMORYTYPE_HOST;
    return say("%d %llx", a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE, P(p));
}
CUresult cuMemHostAlloc(void **out, size_t n, unsigned flags) { HANDLE(out, void *); return say("%zx %u", n, flags); }
CUresult cuMemHostRegister_v2(void *a, size_t n, unsigned flags) { return say("%llx %zu %u", P(a), n, flags); }
CUresult cuMemHostUnregister(void *a) { return say("%llx", P(a)); }
CUresult cuMemFreeHost(void *a) { return say("%llx", P(a)); }
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t n) { return say("%llx %.*s %zx", P(to), (int)n, (char *)from, n); }
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n, CUstream s) { return say("%llx %llx %zx %llx", P(to), P(from), n, P(s)); }
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t n, CUstream s) { return say("%llx %llx %zx %llx", P(to), P(from), n, P(s)); }
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s) { return say("%llx %llx %zx %llx", P(to), P(from), n, P(s)); }
static void block(const CUDA_MEMCPY3D *p) {
    CUDA_MEMCPY3D rest = *p;
    say("%d %d %llx %llx %zx %zx %zx %zx %zx %zx %zx", p->srcMemoryType, p->dstMemoryType, P(p->srcDevice), P(p->dstDevice), p->WidthInBytes,
        p->Height, p->Depth, p->srcPitch, p->srcHeight, p->dstPitch, p->dstHeight);
    rest.srcMemoryType = rest.dstMemoryType = 0;
    rest.srcDevice = rest.dstDevice = 0;
    rest.WidthInBytes = rest.Height = rest.Depth = rest.srcPitch = rest.srcHeight = rest.dstPitch = rest.dstHeight = 0;
    for (size_t i = 0; i < sizeof rest; i++)
        if (((char *)&rest)[i]) say(" NOT ZERO at %zu", i);
}
CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *p, CUstream s) { block(p); return say(" %llx", P(s)); }
CUresult cuMemsetD8Async(CUdeviceptr a, unsigned char v, size_t n, CUstream s) { return say("%llx %x %zx %llx", P(a), v, n, P(s)); }
CUresult cuMemsetD16Async(CUdeviceptr a, unsigned short v, size_t n, CUstream s) { return say("%llx %x %zx %llx", P(a), v, n, P(s)); }
CUresult cuMemsetD32Async(CUdeviceptr a, unsigned v, size_t n, CUstream s) { return say("%llx %x %zx %llx", P(a), v, n, P(s)); }
CUresult cuMemsetD2D8Async(CUdeviceptr a, size_t pitch, unsigned char v, size_t w, size_t h, CUstream s) { return say("%llx %zx %x %zx %zx %llx", P(a), pitch, v, w, h, P(s)); }
CUresult cuMemsetD2D16Async(CUdeviceptr a, size_t pitch, unsigned short v, size_t w, size_t h, CUstream s) { return say("%llx %zx %x %zx %zx %llx", P(a), pitch, v, w, h, P(s)); }
CUresult cuMemsetD2D32Async(CUdeviceptr a, size_t pitch, unsigned v, size_t w, size_t h, CUstream s) { return say("%llx %zx %x %zx %zx %llx", P(a), pitch, v, w, h, P(s)); }
CUresult cuStreamCreate(CUstream *out, unsigned flags) { HANDLE(out, CUstream); return say("%d", flags == CU_STREAM_NON_BLOCKING); }
CUresult cuStreamDestroy_v2(CUstream s) { return say("%llx", P(s)); }
CUresult cuStreamSynchronize(CUstream s) { return say("%llx", P(s)); }
CUresult cuStreamQuery(CUstream s) { return say("%llx", P(s)); }
CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned flags) { return say("%llx %llx %u", P(s), P(e), flags); }
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *out) { *out = CU_STREAM_CAPTURE_STATUS_ACTIVE; return say("%llx", P(s)); }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    say("%d", *mode == CU_STREAM_CAPTURE_MODE_RELAXED);
    *mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    return CUDA_SUCCESS;
}
CUresult cuStreamGetCaptureInfo_v3(CUstream s, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **last,
                                   const CUgraphEdgeData **data, size_t *count) {
    *status = CU_STREAM_CAPTURE_STATUS_ACTIVE, *id = 7, *last = nodes, *data = edges, *count = 2;
    HANDLE(graph, CUgraph);
    return say("%llx", P(s));
}
CUresult cuStreamUpdateCaptureDependencies(CUstream s, CUgraphNode *last, size_t n, unsigned flags) {
    return say("%llx %llx %llx %zu %d", P(s), P(last[0]), P(last[n - 1]), n, flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES);
}
CUresult cuEventCreate(CUevent *out, unsigned flags) { HANDLE(out, CUevent); return say("%d%d", flags == CU_EVENT_DEFAULT, flags == CU_EVENT_DISABLE_TIMING); }
CUresult cuEventDestroy_v2(CUevent e) { return say("%llx", P(e)); }
CUresult cuEventRecord(CUevent e, CUstream s) { return say("%llx %llx", P(e), P(s)); }
CUresult cuEventSynchronize(CUevent e) { return say("%llx", P(e)); }
CUresult cuEventElapsedTime(float *out, CUevent a, CUevent b) { *out = 2.5f; return say("%llx %llx", P(a), P(b)); }
CUresult cuModuleLoadData(CUmodule *out, const void *image) { HANDLE(out, CUmodule); return say("%s", (char *)image); }
CUresult cuModuleUnload(CUmodule m) { return say("%llx", P(m)); }
CUresult cuModuleGetFunction(CUfunction *out, CUmodule m, const char *name) { HANDLE(out, CUfunction); return say("%llx %s", P(m), name); }
CUresult cuModuleGetGlobal_v2(CUdeviceptr *out, size_t *n, CUmodule m, const char *name) {
    HANDLE(out, CUdeviceptr);
    *n = 3ull << 33;
    return say("%llx %s", P(m), name);
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return say("%llx %d %d", P(f), a, v); }
CUresult cuFuncGetParamInfo(CUfunction f, size_t i, size_t *offset, size_t *size) {
    *offset = 8, *size = 3ull << 33;
    return say("%llx %zx", P(f), i);
}
static void attribute(CUlaunchAttributeID id, const CUlaunchAttributeValue *v) {
    say(" [%d:", id);
    if (id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) say("%u,%u,%u", v->clusterDim.x, v->clusterDim.y, v->clusterDim.z);
    if (id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) say("%d", v->cooperative);
    if (id == CU_LAUNCH_ATTRIBUTE_PRIORITY) say("%d", v->priority);
    if (id == CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP) say("%d,%d", v->memSyncDomainMap.default_, v->memSyncDomainMap.remote);
    if (id == CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) say("%u", v->sharedMemCarveout);
    say("]");
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, CUfunction f, int threads, size_t shared) { *out = 6; return say("%llx %d %zx", P(f), threads, shared); }
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
    say("%u,%u,%u %u,%u,%u %x %llx %llx %llx %llx", c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
        c->sharedMemBytes, P(c->hStream), P(f), P(params), P(extra));
    for (unsigned i = 0; i < c->numAttrs; i++) attribute(c->attrs[i].id, &c->attrs[i].value);
    return CUDA_SUCCESS;
}
CUresult cuGraphCreate(CUgraph *out, unsigned flags) { HANDLE(out, CUgraph); return say("%u", flags); }
CUresult cuGraphDestroy(CUgraph g) { return say("%llx", P(g)); }
CUresult cuGraphClone(CUgraph *out, CUgraph g) { HANDLE(out, CUgraph); return say("%llx", P(g)); }
CUresult cuGraphNodeFindInClone(CUgraphNode *out, CUgraphNode node, CUgraph g) { HANDLE(out, CUgraphNode); return say("%llx %llx", P(node), P(g)); }
CUresult cuGraphDestroyNode(CUgraphNode node) { return say("%llx", P(node)); }
CUresult cuGraphNodeSetEnabled(CUgraphExec g, CUgraphNode node, unsigned on) { return say("%llx %llx %u", P(g), P(node), on); }
CUresult cuGraphAddKernelNode_v2(CUgraphNode *out, CUgraph g, const CUgraphNode *after, size_t n, const CUDA_KERNEL_NODE_PARAMS_v2 *p) {
    HANDLE(out, CUgraphNode);
    return say("%llx %llx %zu %llx %u,%u,%u %u,%u,%u %x %llx %llx %llx %llx", P(g), P(after), n, P(p->func), p->gridDimX, p->gridDimY,
               p->gridDimZ, p->blockDimX, p->blockDimY, p->blockDimZ, p->sharedMemBytes, P(p->kernelParams), P(p->extra), P(p->kern), P(p->ctx));
}
CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec g, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2 *p) {
    return say("%llx %llx %llx %u,%u,%u %u,%u,%u %x %llx %llx", P(g), P(node), P(p->func), p->gridDimX, p->gridDimY, p->gridDimZ,
               p->blockDimX, p->blockDimY, p->blockDimZ, p->sharedMemBytes, P(p->kernelParams), P(p->extra));
}
CUresult cuGraphAddMemsetNode(CUgraphNode *out, CUgraph g, const CUgraphNode *after, size_t n, const CUDA_MEMSET_NODE_PARAMS *p, CUcontext c) {
    HANDLE(out, CUgraphNode);
    return say("%llx %llx %zu %llx %zx %x %x %zx %zx %llx", P(g), P(after), n, P(p->dst), p->pitch, p->value, p->elementSize, p->width, p->height, P(c));
}
CUresult cuGraphAddMemcpyNode(CUgraphNode *out, CUgraph g, const CUgraphNode *after, size_t n, const CUDA_MEMCPY3D *p, CUcontext c) {
    HANDLE(out, CUgraphNode);
    block(p);
    return say(" %llx %llx %zu %llx", P(g), P(after), n, P(c));
}
CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec g, CUgraphNode node, const CUDA_MEMCPY3D *p, CUcontext c) {
    block(p);
    return say(" %llx %llx %llx", P(g), P(node), P(c));
}
CUresult cuGraphAddEmptyNode(CUgraphNode *out, CUgraph g, const CUgraphNode *after, size_t n) { HANDLE(out, CUgraphNode); return say("%llx %llx %zu", P(g), P(after), n); }
CUresult cuGraphAddChildGraphNode(CUgraphNode *out, CUgraph g, const CUgraphNode *after, size_t n, CUgraph child) {
    HANDLE(out, CUgraphNode);
    return say("%llx %llx %llx %zu %llx", P(g), P(after[0]), P(after[n - 1]), n, P(child));
}
CUresult cuGraphAddNode(CUgraphNode *out, CUgraph g, const CUgraphNode *after, size_t n, CUgraphNodeParams *p) {
    CUgraphNodeParams rest = *p;
    HANDLE(out, CUgraphNode);
    memset(&rest.conditional, 0, sizeof rest.conditional);
    rest.type = 0;
    for (size_t i = 0; i < sizeof rest; i++)
        if (((char *)&rest)[i]) say("NOT ZERO at %zu ", i);
    p->conditional.phGraph_out = bodies;
    return say("%llx %llx %zu %d %llx %d%d %u %llx", P(g), P(after), n, p->type == CU_GRAPH_NODE_TYPE_CONDITIONAL, P(p->conditional.handle),
               p->conditional.type == CU_GRAPH_COND_TYPE_IF, p->conditional.type == CU_GRAPH_COND_TYPE_WHILE, p->conditional.size, P(p->conditional.ctx));
}
CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle *out, CUgraph g, CUcontext c, unsigned value, unsigned flags) {
    HANDLE(out, CUgraphConditionalHandle);
    return say("%llx %llx %u %u", P(g), P(c), value, flags);
}
CUresult cuGraphKernelNodeSetAttribute(CUgraphNode n, CUkernelNodeAttrID id, const CUkernelNodeAttrValue *v) {
    say("%llx", P(n));
    attribute(id, v);
    return CUDA_SUCCESS;
}
CUresult cuGraphAddDependencies(CUgraph g, const CUgraphNode *from, const CUgraphNode *to, size_t n) {
    return say("%llx %llx %llx %llx %zu", P(g), P(from[0]), P(from[n - 1]), P(to[n - 1]), n);
}
CUresult cuGraphAddDependencies_v2(CUgraph g, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data, size_t n) {
    return say("%llx %llx %llx %d,%d,%d %zu", P(g), P(from[n - 1]), P(to[n - 1]), data[n - 1].from_port, data[n - 1].to_port, data[n - 1].type, n);
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph g, unsigned long long flags) {
    HANDLE(out, CUgraphExec);
    return say("%llx %d", P(g), flags == CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY);
}
CUresult cuGraphExecDestroy(CUgraphExec e) { return say("%llx", P(e)); }
CUresult cuGraphUpload(CUgraphExec e, CUstream s) { return say("%llx %llx", P(e), P(s)); }
CUresult cuGraphLaunch(CUgraphExec e, CUstream s) { return say("%llx %llx", P(e), P(s)); }

extern const size_t sizes[];
const size_t sizes[] = {sizeof(CUDA_KERNEL_NODE_PARAMS_v2), sizeof(CUDA_MEMSET_NODE_PARAMS), sizeof(CUDA_MEMCPY3D), sizeof(CUlaunchAttributeValue),
                        sizeof(CUlaunchAttribute), sizeof(CUlaunchConfig), sizeof(CUgraphEdgeData), sizeof(CUgraphNodeParams),
                        sizeof(CUmemAllocationProp), sizeof(CUmemAccessDesc),
                        sizeof(CUipcMemHandle)};
