# Writes `output`, a C++ file that defines onnx_kv::cuda::Sources() (ops/cuda/sources.h) from the CUDA files given. An
# edited file configures again and is embedded anew.
function(embed_sources output)
  set(entries "")
  foreach(path IN LISTS ARGN)
    file(READ "${path}" text)
    string(LENGTH "${text}" length)
    if(length GREATER 65000)
      message(FATAL_ERROR "${path} is too long for a string literal; split it")
    endif()
    file(RELATIVE_PATH name "${PROJECT_SOURCE_DIR}" "${path}")
    string(APPEND entries "    {\"${name}\", R\"__cuda__(${text})__cuda__\"},\n")
  endforeach()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${ARGN}")
  file(CONFIGURE OUTPUT "${output}" @ONLY CONTENT "#include \"onnx_kv/ops/cuda/sources.h\"

namespace onnx_kv::cuda {

const std::vector<Source>& Sources() {
  static const std::vector<Source> sources = {
@entries@  };
  return sources;
}

}  // namespace onnx_kv::cuda
")
endfunction()
