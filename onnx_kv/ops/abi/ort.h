// The part of ONNX Runtime's C ABI that the op library uses, declared here because its wheels ship no headers.
//
// OrtApi is a table of functions that only ever grows at its end, so a function's slot never changes; OrtCustomOp is
// read by ONNX Runtime up to the member that its `version` implies. Every member that we name has its slot checked.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnx_kv::ort {

// The oldest ONNX Runtime that we support is 1.23: its API version is asked for and declared in OrtCustomOp. Newer
// runtimes serve it; with a newer number here an older runtime would refuse the operators.
inline constexpr uint32_t kApiVersion = 23;

struct Status;
struct SessionOptions;
struct CustomOpDomain;
struct KernelInfo;
struct KernelContext;
struct ShapeInferContext;
struct Value;
struct TensorTypeAndShapeInfo;
struct CustomOp;

enum ErrorCode : int32_t { kFail = 1, kInvalidArgument = 2, kRuntimeException = 6, kNotImplemented = 9 };
enum ElementType : int32_t { kFloat = 1, kInt32 = 6, kInt64 = 7, kFloat16 = 10, kBFloat16 = 16 };
enum Characteristic : int32_t { kRequired = 0, kOptional = 1 };
enum MemoryType : int32_t { kCpuInput = -2, kDefault = 0 };

#define ONNX_KV_GAP(first, last) void* gap_##first##_##last[last - first + 1]

// A failing function returns a Status that the caller releases; nullptr is success.
struct Api {
  Status* (*CreateStatus)(ErrorCode code, const char* message);
  ONNX_KV_GAP(1, 1);
  const char* (*GetErrorMessage)(const Status* status);
  ONNX_KV_GAP(3, 25);
  Status* (*CreateCustomOpDomain)(const char* domain, CustomOpDomain** out);
  Status* (*CustomOpDomain_Add)(CustomOpDomain* domain, const CustomOp* op);
  Status* (*AddCustomOpDomain)(SessionOptions* options, CustomOpDomain* domain);
  ONNX_KV_GAP(29, 50);
  Status* (*GetTensorMutableData)(Value* value, void** out);
  ONNX_KV_GAP(52, 59);
  Status* (*GetTensorElementType)(const TensorTypeAndShapeInfo* info, ElementType* out);
  Status* (*GetDimensionsCount)(const TensorTypeAndShapeInfo* info, size_t* out);
  Status* (*GetDimensions)(const TensorTypeAndShapeInfo* info, int64_t* dims, size_t count);
  ONNX_KV_GAP(63, 64);
  Status* (*GetTensorTypeAndShape)(const Value* value, TensorTypeAndShapeInfo** out);
  ONNX_KV_GAP(66, 84);
  Status* (*KernelInfoGetAttribute_float)(const KernelInfo* info, const char* name, float* out);
  Status* (*KernelInfoGetAttribute_int64)(const KernelInfo* info, const char* name, int64_t* out);
  Status* (*KernelInfoGetAttribute_string)(const KernelInfo* info, const char* name, char* out, size_t* size);
  ONNX_KV_GAP(88, 89);
  Status* (*KernelContext_GetInput)(const KernelContext* context, size_t index, const Value** out);
  Status* (*KernelContext_GetOutput)(KernelContext* context, size_t index, const int64_t* dims, size_t count,
                                     Value** out);
  ONNX_KV_GAP(92, 92);
  void (*ReleaseStatus)(Status* status);
  ONNX_KV_GAP(94, 98);
  void (*ReleaseTensorTypeAndShapeInfo)(TensorTypeAndShapeInfo* info);
  ONNX_KV_GAP(100, 192);
  Status* (*KernelContext_GetGPUComputeStream)(const KernelContext* context, void** out);
  ONNX_KV_GAP(194, 229);
  Status* (*KernelInfo_GetInputCount)(const KernelInfo* info, size_t* out);
  Status* (*KernelInfo_GetOutputCount)(const KernelInfo* info, size_t* out);
  Status* (*KernelInfo_GetInputName)(const KernelInfo* info, size_t index, char* out, size_t* size);
  Status* (*KernelInfo_GetOutputName)(const KernelInfo* info, size_t index, char* out, size_t* size);
  ONNX_KV_GAP(234, 243);
  Status* (*KernelInfo_GetNodeName)(const KernelInfo* info, char* out, size_t* size);
  ONNX_KV_GAP(245, 273);
  Status* (*KernelContext_ParallelFor)(const KernelContext* context, void (*body)(void* data, size_t index),
                                       size_t total, size_t batches, void* data);
};

// What RegisterCustomOps is given.
struct ApiBase {
  const Api* (*GetApi)(uint32_t version);  // nullptr: this runtime is older
  const char* (*GetVersionString)();
};

struct CustomOp {
  uint32_t version;
  void* (*CreateKernel)(const CustomOp* op, const Api* api, const KernelInfo* info);
  const char* (*GetName)(const CustomOp* op);
  const char* (*GetExecutionProviderType)(const CustomOp* op);
  ElementType (*GetInputType)(const CustomOp* op, size_t index);
  size_t (*GetInputTypeCount)(const CustomOp* op);
  ElementType (*GetOutputType)(const CustomOp* op, size_t index);
  size_t (*GetOutputTypeCount)(const CustomOp* op);
  void (*KernelCompute)(void* kernel, KernelContext* context);
  void (*KernelDestroy)(void* kernel);
  Characteristic (*GetInputCharacteristic)(const CustomOp* op, size_t index);
  Characteristic (*GetOutputCharacteristic)(const CustomOp* op, size_t index);
  MemoryType (*GetInputMemoryType)(const CustomOp* op, size_t index);
  int (*GetVariadicInputMinArity)(const CustomOp* op);
  int (*GetVariadicInputHomogeneity)(const CustomOp* op);
  int (*GetVariadicOutputMinArity)(const CustomOp* op);
  int (*GetVariadicOutputHomogeneity)(const CustomOp* op);
  Status* (*CreateKernelV2)(const CustomOp* op, const Api* api, const KernelInfo* info, void** kernel);
  Status* (*KernelComputeV2)(void* kernel, KernelContext* context);
  Status* (*InferOutputShapeFn)(const CustomOp* op, ShapeInferContext* context);
  int (*GetStartVersion)(const CustomOp* op);
  int (*GetEndVersion)(const CustomOp* op);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};

#undef ONNX_KV_GAP

// Slot numbers of the published tables.
#define ONNX_KV_SLOT(table, member, slot) static_assert(offsetof(table, member) == (slot) * sizeof(void*), #member)
ONNX_KV_SLOT(Api, CreateStatus, 0);
ONNX_KV_SLOT(Api, GetErrorMessage, 2);
ONNX_KV_SLOT(Api, CreateCustomOpDomain, 26);
ONNX_KV_SLOT(Api, CustomOpDomain_Add, 27);
ONNX_KV_SLOT(Api, AddCustomOpDomain, 28);
ONNX_KV_SLOT(Api, GetTensorMutableData, 51);
ONNX_KV_SLOT(Api, GetTensorElementType, 60);
ONNX_KV_SLOT(Api, GetDimensionsCount, 61);
ONNX_KV_SLOT(Api, GetDimensions, 62);
ONNX_KV_SLOT(Api, GetTensorTypeAndShape, 65);
ONNX_KV_SLOT(Api, KernelInfoGetAttribute_float, 85);
ONNX_KV_SLOT(Api, KernelInfoGetAttribute_int64, 86);
ONNX_KV_SLOT(Api, KernelInfoGetAttribute_string, 87);
ONNX_KV_SLOT(Api, KernelContext_GetInput, 90);
ONNX_KV_SLOT(Api, KernelContext_GetOutput, 91);
ONNX_KV_SLOT(Api, ReleaseStatus, 93);
ONNX_KV_SLOT(Api, ReleaseTensorTypeAndShapeInfo, 99);
ONNX_KV_SLOT(Api, KernelContext_GetGPUComputeStream, 193);
ONNX_KV_SLOT(Api, KernelInfo_GetInputCount, 230);
ONNX_KV_SLOT(Api, KernelInfo_GetOutputCount, 231);
ONNX_KV_SLOT(Api, KernelInfo_GetInputName, 232);
ONNX_KV_SLOT(Api, KernelInfo_GetOutputName, 233);
ONNX_KV_SLOT(Api, KernelInfo_GetNodeName, 244);
ONNX_KV_SLOT(Api, KernelContext_ParallelFor, 274);
ONNX_KV_SLOT(CustomOp, version, 0);
ONNX_KV_SLOT(CustomOp, CreateKernel, 1);
ONNX_KV_SLOT(CustomOp, KernelCompute, 8);
ONNX_KV_SLOT(CustomOp, GetInputCharacteristic, 10);
ONNX_KV_SLOT(CustomOp, GetInputMemoryType, 12);
ONNX_KV_SLOT(CustomOp, CreateKernelV2, 17);
ONNX_KV_SLOT(CustomOp, InferOutputShapeFn, 19);
ONNX_KV_SLOT(CustomOp, GetMayInplace, 22);
ONNX_KV_SLOT(CustomOp, ReleaseAliasMap, 25);
#undef ONNX_KV_SLOT

}  // namespace onnx_kv::ort
