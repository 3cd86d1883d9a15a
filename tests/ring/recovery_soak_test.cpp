// Thousands of allocation failures, over all call sites and strategies.

#include <gtest/gtest.h>

#include "support/injected_failures.h"

namespace annulus {
namespace {

TEST(Recovery, FromFiveThousandFailures) { test::inject_many(test::slowness() > 1 ? 500 : 5000); }

}  // namespace
}  // namespace annulus
