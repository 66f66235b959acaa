// A question passed down to whoever asks it: refers to a callable of the caller, owns nothing and allocates nothing.
// Only for parameters, since it is valid no longer than the call it is passed to.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace unisono {

template <class Signature>
class FunctionRef;

template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef> && std::is_invocable_r_v<R, F&, Args...>)
  FunctionRef(F&& f)  // NOLINT: converts on purpose
      : state_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
        call_([](void* state, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(state))(std::forward<Args>(args)...);
        }) {}
  R operator()(Args... args) const { return call_(state_, std::forward<Args>(args)...); }

 private:
  void* state_;
  R (*call_)(void*, Args...);
};

}  // namespace unisono
