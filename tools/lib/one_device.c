/* One GPU that can do nothing, for builds of torch for CUDA on machines without one (tools/lanes.sh torch).

   The autograd engine asks for the number of devices and whether one has a context, also where all tensors are fake.
   Preloaded as libcuda.so.1, this answers: one device, without a context. Whatever would use it fails. */

#define SUCCESS 0
#define NO_DEVICE 100

int cudaGetDeviceCount(int *count) { *count = 1; return SUCCESS; }
int cudaGetDevice(int *device) { *device = 0; return SUCCESS; }
int cudaSetDevice(int device) { return device == 0 ? SUCCESS : NO_DEVICE; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return SUCCESS; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return SUCCESS; }
int cudaThreadExchangeStreamCaptureMode(int *mode) { return SUCCESS; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return SUCCESS; }

#define FAILS(name) int name(void) { return NO_DEVICE; }
FAILS(cuCtxGetCurrent)
FAILS(cuCtxSetCurrent)
FAILS(cuDeviceGet)
FAILS(cuDeviceGetAttribute)
FAILS(cuDevicePrimaryCtxRetain)
FAILS(cuFuncGetAttribute)
FAILS(cuFuncSetAttribute)
FAILS(cuFuncSetCacheConfig)
FAILS(cuGetErrorString)
FAILS(cuLaunchCooperativeKernel)
FAILS(cuLaunchKernel)
FAILS(cuLaunchKernelEx)
FAILS(cuLinkAddData_v2)
FAILS(cuLinkComplete)
FAILS(cuLinkCreate_v2)
FAILS(cuModuleGetFunction)
FAILS(cuModuleLoad)
FAILS(cuModuleLoadData)
FAILS(cuModuleLoadDataEx)
FAILS(cuModuleUnload)
FAILS(cuOccupancyMaxActiveBlocksPerMultiprocessor)
FAILS(cuPointerGetAttribute)
FAILS(cuTensorMapEncodeTiled)
