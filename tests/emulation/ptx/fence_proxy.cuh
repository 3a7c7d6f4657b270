#pragma once

namespace omniw4::ptx {

inline void fence_proxy_async() {}

}  // namespace omniw4::ptx
