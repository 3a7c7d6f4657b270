// Host side: tensor maps, which tell the copy engine of sm_90 and newer how a matrix lies in memory.
#pragma once

#include "../omniw4.h"

#include <cuda.h>
#include <cstdint>

namespace omniw4 {

// The driver's encoder, asked for through the runtime so that nothing links against the driver; null without one.
inline auto tensor_map_encoder() {
    using Encoder = decltype(&cuTensorMapEncodeTiled);
    static const Encoder encoder = [] {
        constexpr unsigned kSince = 12000;  // the CUDA version whose driver brought it
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result{};
        const cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince, cudaEnableDefault, &result);
        if (error != cudaSuccess) cudaGetLastError();
        return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encoder>(function)
                                                                             : nullptr;
    }();
    return encoder;
}

// A matrix [rows, cols] of dtype whose rows lie row_stride elements apart, copied in boxes of box_rows rows by 64
// columns (128 bytes) with the 128-byte swizzle. Rows past the end read as zeros.
inline Status make_tensor_map(CUtensorMap& map, const void* matrix, int64_t rows, int64_t cols, int64_t row_stride,
                              uint32_t box_rows, DType dtype) {
    const auto encode = tensor_map_encoder();
    if (encode == nullptr) return Status::kUnsupported;
    const CUtensorMapDataType type =
        dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_stride) * 2};
    const cuuint32_t box[2] = {64, box_rows}, steps[2] = {1, 1};
    const CUresult result =
        encode(&map, type, 2, const_cast<void*>(matrix), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? Status::kOk : Status::kBadShape;
}

}  // namespace omniw4
