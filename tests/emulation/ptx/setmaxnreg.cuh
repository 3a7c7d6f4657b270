#pragma once

namespace omniw4::ptx {

template <int registers>
void setmaxnreg_decrease() {}
template <int registers>
void setmaxnreg_increase() {}

}  // namespace omniw4::ptx
