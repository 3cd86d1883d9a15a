#include "pattern/mask_rules.h"

#include <string>

#include "annulus/error.h"

namespace annulus {

void refuse_mask(const char* where, const Mask& mask) {
  throw ConfigError(std::string(where) + ": found a mask of kind " +
                    std::to_string(static_cast<int>(mask.kind)) + " with shift " +
                    std::to_string(mask.shift) +
                    ", expected one that is known here: full, or causal without a shift");
}

}  // namespace annulus
