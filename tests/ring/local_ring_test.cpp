// All ranks of a ring in one process, as annulus.attention runs them.

#include "local_ring.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/ring_attention.h"

namespace annulus::python {
namespace {

// The rank that computes longest keeps the others waiting.
TEST(LocalRing, IsAsPatientAsItsDocumentsAreLong) {
  constexpr std::int64_t kTokens = 2048;
  RingOptions options{dense(1), Placement::contiguous(kTokens, 2)};
  options.head_dim = 512;
  options.backward = false;
  const auto patience = [&](const std::vector<Document>& documents) {
    RingOptions made = options;
    made.pattern.documents = documents;
    return LocalRing(made).deadline();
  };
  std::vector<std::int64_t> boundaries;
  for (std::int64_t token = 0; token <= kTokens; token += 16) boundaries.push_back(token);
  const std::vector<Document> many = packed_documents(boundaries);
  ASSERT_LT(patience(many), patience({}));
  options.pattern.documents = many;
  LocalRing ring(options);
  ring.set_documents({});
  EXPECT_EQ(ring.deadline(), patience({}));
  ring.set_documents(many);
  EXPECT_EQ(ring.deadline(), patience(many));
}

}  // namespace
}  // namespace annulus::python
