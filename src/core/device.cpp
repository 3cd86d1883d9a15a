#include "annulus/device.h"

namespace annulus {

std::string name_of(const Device& device) {
  return device.kind == Device::Kind::cpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

}  // namespace annulus
