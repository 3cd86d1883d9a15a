#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "annulus/in_process.h"
#include "annulus/transport.h"
#include "support/transport_checks.h"

// What every transport must do. A test program includes the lists once
// (transport_contract_messages.h, transport_contract_errors.h) and names its transports:
//
//   INSTANTIATE_TEST_SUITE_P(, TransportContract, testing::Values(TransportMaker{"mpi", ...}),
//                            name_of_maker);
//
// Errors may come from post() or, where the transport learns of them later, from wait().
namespace annulus::test {

using Ring = std::vector<std::unique_ptr<Transport>>;

struct TransportMaker {
  std::string name;
  // Makes a ring whose ranks are all in this process.
  std::function<Ring(int ranks, milliseconds deadline)> make;
  // Whether queues' memory is moved by their copies, so that wait(queue) does not wait for the
  // device.
  bool by_queues = false;
  // For rings whose other ranks are elsewhere, which have no `make`: runs the body on this
  // process's rank of a ring of that many ranks. Only tests that look at one end can use it.
  std::function<void(int ranks, const std::function<void(Transport&)>& body)> run = {};
};
inline void PrintTo(const TransportMaker& maker, std::ostream* out) { *out << maker.name; }
inline std::string name_of_maker(const testing::TestParamInfo<TransportMaker>& info) {
  return info.param.name;
}

class TransportContract : public testing::TestWithParam<TransportMaker> {
 protected:
  static Ring make(int ranks, milliseconds deadline = milliseconds(60'000)) {
    return GetParam().make(ranks, deadline);
  }
  // Runs the body on every rank of a ring.
  static void run(int ranks, const std::function<void(Transport&)>& body) {
    if (GetParam().run) {
      GetParam().run(ranks, body);
    } else {
      run_in_process(make(ranks), body);
    }
  }
  static int next(const Transport& transport) { return (transport.rank() + 1) % transport.size(); }
  static int previous(const Transport& transport) {
    return (transport.rank() + transport.size() - 1) % transport.size();
  }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TransportContract);

}  // namespace annulus::test
