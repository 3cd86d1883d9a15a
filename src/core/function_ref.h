#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace annulus {

template <typename Signature>
class FunctionRef;

// A borrowed callable: unlike std::function it never allocates. The callable must outlive the call
// it is passed to.
template <typename Result, typename... Arguments>
class FunctionRef<Result(Arguments...)> {
 public:
  // Lambdas are passed where they are written; clang-tidy 14 does not see the constraint.
  template <typename Callable>
  requires(!std::is_same_v<std::remove_cvref_t<Callable>, FunctionRef>)
      // NOLINTNEXTLINE(google-explicit-constructor,bugprone-forwarding-reference-overload)
      FunctionRef(Callable&& callable)
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(callable)))),
        call_([](void* object, Arguments... arguments) -> Result {
          return (*static_cast<std::remove_reference_t<Callable>*>(object))(
              std::forward<Arguments>(arguments)...);
        }) {}

  Result operator()(Arguments... arguments) const {
    return call_(object_, std::forward<Arguments>(arguments)...);
  }

 private:
  void* object_;
  Result (*call_)(void*, Arguments...);
};

}  // namespace annulus
