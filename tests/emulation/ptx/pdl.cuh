#pragma once

namespace omniw4::ptx {

inline void pdl_launch_dependents() {}
inline void pdl_wait() {}

}  // namespace omniw4::ptx
