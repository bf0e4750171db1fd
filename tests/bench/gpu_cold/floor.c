/* The least that any process needs before it can use a GPU: cuInit and the primary context.  Prints the moment when it was
   there, in seconds of the monotonic clock, which the parent compares with when it started this process. */
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>

int main(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
    int (*device)(int *, int) = (int (*)(int *, int))dlsym(driver, "cuDeviceGet");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
    int number, error;
    void *context;
    if ((error = init(0)) || (error = device(&number, 0)) || (error = retain(&context, number))) {
        fprintf(stderr, "CUDA error %d\n", error);
        return 1;
    }
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    printf("%ld.%09ld\n", (long)now.tv_sec, now.tv_nsec);
    return 0;
}
