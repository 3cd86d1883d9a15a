#include "transport/mpi_session.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "annulus/error.h"
#include "transport/mpi_endpoint.h"

namespace annulus::mpi {
namespace {

// How long a program waits at its end for ranks that have not said goodbye. They may be late, or
// hang.
constexpr std::chrono::seconds kPatience{10};

// This process's relation to MPI. Never destroyed, because threads may outlive static objects.
struct Session {
  std::mutex mutex;
  bool begun = false;
  pid_t initialised_by = 0;
  std::vector<std::weak_ptr<Endpoint>> endpoints;

  static Session& get() {
    static auto* session = new Session;
    return *session;
  }

  // False: some rank did not say goodbye in time.
  bool end() {
    std::vector<std::weak_ptr<Endpoint>> all;
    {
      const std::lock_guard lock(mutex);
      all.swap(endpoints);
    }
    const auto until = Clock::now() + kPatience;
    for (const auto& one : all) {
      if (const auto endpoint = one.lock()) endpoint->leave();
    }
    bool everybody_left = true;
    for (const auto& one : all) {
      if (const auto endpoint = one.lock()) everybody_left &= endpoint->finish(until);
    }
    return everybody_left;
  }
};

// MPI calls this at the start of MPI_Finalize, when everything still works.
int on_finalize(MPI_Comm, int, void*, void*) {
  (void)Session::get().end();
  return MPI_SUCCESS;
}

// For programs that let Annulus initialise MPI. If a rank is lost, MPI_Finalize would wait for it
// forever. Without it, mpirun ends the job, as it does when a process exits early.
void finalise() {
  Session& session = Session::get();
  if (session.initialised_by != ::getpid()) return;  // a forked child
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized == 0 && session.end()) MPI_Finalize();
}

const char* name_of_level(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    default:
      return "MPI_THREAD_MULTIPLE";
  }
}

void check(int code, const char* what) {
  if (code != MPI_SUCCESS) {
    throw TransportError(std::string(what) + " failed: " + error_text(code));
  }
}

}  // namespace

void begin() {
  Session& session = Session::get();
  const std::lock_guard lock(session.mutex);
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) {
    throw ConfigError("MPI transport: MPI has been finalised: make transports before MPI_Finalize");
  }
  int initialized = 0;
  MPI_Initialized(&initialized);
  int level = MPI_THREAD_SINGLE;
  if (initialized == 0) {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    session.initialised_by = ::getpid();
    std::atexit(finalise);
  } else {
    check(MPI_Query_thread(&level), "MPI_Query_thread");
  }
  if (level < MPI_THREAD_MULTIPLE) {
    throw ConfigError(std::string("MPI transport: MPI runs with ") + name_of_level(level) +
                      ", expected MPI_THREAD_MULTIPLE, since a thread moves messages while the "
                      "caller computes: " +
                      (initialized != 0
                           ? "call MPI_Init_thread(..., MPI_THREAD_MULTIPLE, ...), not MPI_Init"
                           : "this MPI library was built without it"));
  }
  if (session.begun) return;
  int key = MPI_KEYVAL_INVALID;
  check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_finalize, &key, nullptr),
        "MPI_Comm_create_keyval");
  check(MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr), "MPI_Comm_set_attr");
  session.begun = true;
}

void attend_to(const std::shared_ptr<Endpoint>& endpoint) {
  Session& session = Session::get();
  const std::lock_guard lock(session.mutex);
  std::erase_if(session.endpoints, [](const auto& one) { return one.expired(); });
  session.endpoints.push_back(endpoint);
}

Communicator::Communicator(MPI_Comm parent, int loopback_ranks) : loopback_(loopback_ranks > 0) {
  check(MPI_Comm_dup(parent, &handle_), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(handle_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check(MPI_Comm_rank(handle_, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(handle_, &size_), "MPI_Comm_size");
  if (loopback_) size_ = loopback_ranks;
}

std::shared_ptr<Communicator> Communicator::copy_of(MPI_Comm parent) {
  return std::shared_ptr<Communicator>(new Communicator(parent, 0));
}

std::shared_ptr<Communicator> Communicator::loopback(int ranks) {
  return std::shared_ptr<Communicator>(new Communicator(MPI_COMM_SELF, ranks));
}

Communicator::~Communicator() {
  if (!abandoned_ && handle_ != MPI_COMM_NULL) MPI_Comm_free(&handle_);
}

std::string error_text(int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) {
    return "MPI error " + std::to_string(code);
  }
  return {text, static_cast<std::size_t>(length)};
}

}  // namespace annulus::mpi
