#include "onnx_kv/ops/memory/cuda_backend.h"

namespace onnx_kv::memory {
namespace {

using cuda::UseDevice;

CUmemAllocationProp PropertiesOf(const cuda::Device& device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device.ordinal();
  return properties;
}

uint64_t GranuleOf(const cuda::Device& device, uint64_t wanted) {
  if (device.Attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0) {
    throw Error(ONNX_KV_UNSUPPORTED,
                "CUDA device " + std::to_string(device.ordinal()) + " has no virtual memory management");
  }
  UseDevice use(device);
  const CUmemAllocationProp properties = PropertiesOf(device);
  size_t smallest = 0;
  CU_CHECK(cuMemGetAllocationGranularity, &smallest, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (wanted % smallest != 0) {
    throw Error(ONNX_KV_INVALID_ARGUMENT, "a granule of " + std::to_string(wanted) +
                                              " bytes is not a multiple of the device's, " + std::to_string(smallest));
  }
  return wanted == 0 ? smallest : wanted;
}

}  // namespace

CudaBackend::CudaBackend(const cuda::Device& device, uint64_t granule)
    : Backend(GranuleOf(device, granule)), device_(device) {}

void CudaBackend::Quiesce() {
  UseDevice use(device_);
  CU_CHECK(cuCtxSynchronize);
}

uint64_t CudaBackend::DoReserve(uint64_t bytes) {
  UseDevice use(device_);
  CUdeviceptr address = 0;
  CU_CHECK(cuMemAddressReserve, &address, bytes, 0, 0, 0);
  return address;
}

void CudaBackend::DoFree(uint64_t address, uint64_t bytes) {
  UseDevice use(device_);
  CU_CHECK(cuMemAddressFree, address, bytes);
}

uint64_t CudaBackend::DoCreate() {
  UseDevice use(device_);
  const CUmemAllocationProp properties = PropertiesOf(device_);
  CUmemGenericAllocationHandle handle = 0;
  CU_CHECK(cuMemCreate, &handle, granule(), &properties, 0);
  return handle;
}

void CudaBackend::DoDestroy(uint64_t handle) {
  UseDevice use(device_);
  CU_CHECK(cuMemRelease, handle);
}

void CudaBackend::DoMap(uint64_t address, uint64_t handle) {
  UseDevice use(device_);
  CU_CHECK(cuMemMap, address, granule(), 0, handle, 0);
}

void CudaBackend::DoUnmap(uint64_t address) {
  UseDevice use(device_);
  CU_CHECK(cuMemUnmap, address, granule());
}

void CudaBackend::DoSetAccess(uint64_t address, uint64_t bytes) {
  UseDevice use(device_);
  CUmemAccessDesc access{};
  access.location = PropertiesOf(device_).location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CU_CHECK(cuMemSetAccess, address, bytes, &access, 1);
}

}  // namespace onnx_kv::memory
