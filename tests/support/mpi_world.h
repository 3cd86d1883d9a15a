#pragma once

#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdio>
#include <memory>
#include <string>

#include "annulus/mpi.h"
#include "annulus/transport.h"
#include "support/transport_checks.h"

// Tests that all processes of an MPI job run together, in the same order.
namespace annulus::test {

class World {
 public:
  static int rank() { return value(MPI_Comm_rank); }
  static int size() { return value(MPI_Comm_size); }

  // A new ring of the first `ranks` processes; null on the others.
  static std::unique_ptr<Transport> ring(int ranks, milliseconds deadline) {
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, rank() < ranks ? 0 : MPI_UNDEFINED, rank(), &part);
    if (part == MPI_COMM_NULL) return nullptr;
    auto transport = make_mpi_transport({.deadline = deadline, .communicator = MPI_Comm_c2f(part)});
    MPI_Comm_free(&part);  // the transport has a copy
    return transport;
  }
  static std::unique_ptr<Transport> ring(milliseconds deadline = milliseconds(60'000)) {
    return ring(size(), deadline);
  }

  // A separate communicator, with which tests synchronise.
  static void meet() { MPI_Barrier(MPI_COMM_WORLD); }

 private:
  static int value(int (*function)(MPI_Comm, int*)) {
    int result = 0;
    function(MPI_COMM_WORLD, &result);
    return result;
  }
};

// Prints failures of ranks other than 0, and nothing else.
class FailurePrinter : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& test) override {
    test_ = std::string(test.test_suite_name()) + "." + test.name();
  }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "[rank %d] %s: %s\n", World::rank(), test_.c_str(), result.message());
  }
  std::string test_;
};

// main() of such tests. The program initialises MPI itself, like a program that also uses MPI for
// other things. A failure on any rank fails the job.
inline int run_mpi_tests(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  testing::InitGoogleTest(&argc, argv);
  if (World::rank() != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailurePrinter);
  }
  const int code = RUN_ALL_TESTS();
  MPI_Finalize();
  return code;
}

}  // namespace annulus::test
