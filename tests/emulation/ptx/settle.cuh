#pragma once

namespace omniw4::ptx {

template <class T>
void settle(T&) {}

}  // namespace omniw4::ptx
