#include "annulus/error.h"
#include "annulus/events.h"
#include "ring/executor.h"

namespace annulus {

void RingAttention::Impl::guard(FunctionRef<void()> pass) {
  try {
    pass();
  } catch (const std::exception& error) {
    // The other ranks would wait for rows that never come. Before cancel(): some transports can
    // cancel pending messages only by ending.
    link->abort(error.what());
    if (key_courier != nullptr) key_courier->cancel();
    if (query_courier != nullptr) query_courier->cancel();
    if (returns != nullptr) returns->cancel();
    throw;
  }
}

void RingAttention::Impl::check_interrupt() const {
  if (interrupted.load(std::memory_order_relaxed))
    throw Interrupted(ring::prefix(*transport, "RingAttention") + "interrupted");
}

void RingAttention::Impl::compute(const char* what, int step, FunctionRef<void()> work) const {
  const EventScope computing(EventKind::compute, what, rank, step);
  work();
}

void RingAttention::Impl::run_steps(ring::Courier& courier, std::span<const TensorRows> sections,
                                    int steps, FunctionRef<void(int stage)> work) {
  const auto run = [&](int stage) {
    work(stage);
    check_interrupt();
  };
  if (steps > 0) compute("pack", -1, [&] { courier.pack(sections); });
  if (options.reproducible) {  // one stage in canonical order needs all rows first
    const EventScope whole(EventKind::step, "step", rank, 0);
    if (steps > 0) {
      courier.prepare(1);
      courier.post();
      courier.finish();
    }
    run(0);
    return;
  }
  for (int step = 0; step <= steps; ++step) {
    const EventScope whole(EventKind::step, "step", rank, step);
    courier.finish();
    if (step < steps) courier.prepare(step + 1);
    // Posting waits for the device: enqueue the stage first to keep it busy.
    if (link->staged()) run(step);
    if (step < steps) {
      courier.post();
      if (options.blocking) courier.finish();
    }
    if (!link->staged()) run(step);
  }
}

// Travelling rows are sent before accumulators are cleared, so that links are busy meanwhile.
void RingAttention::Impl::forward(const ForwardCall& call) {
  const TensorRows sections[] = {call.k, call.v};
  run_steps(*key_courier, sections, key_plan->steps(), [&](int stage) {
    if (stage == 0) compute("begin", -1, [&] { engine->begin_forward(call, *queue); });
    compute("forward", stage, [&] { engine->forward(stage, call, *queue); });
  });
  compute("finish", -1, [&] { engine->finish_forward(call, *queue); });
}

void RingAttention::Impl::backward(const BackwardCall& call) {
  const GradientSums sums = engine->sums(call);
  const TensorRows key_sections[] = {call.k, call.v};
  const TensorRows query_sections[] = {call.q, call.dout, engine->statistics()};
  const auto begin = [&] { compute("begin", -1, [&] { engine->begin_backward(call, *queue); }); };
  const auto stage = [&](int s) {
    compute("backward", s, [&] { engine->backward(s, call, *queue); });
  };
  if (options.reproducible) {
    run_steps(*key_courier, key_sections, key_plan->steps(), [&](int) {
      begin();
      stage(0);
    });
    run_steps(*query_courier, query_sections, query_plan->steps(), [&](int) { stage(1); });
  } else {
    const TensorRows key_gradients[] = {sums.dk, sums.dv};
    const TensorRows query_gradients[] = {sums.dq};
    const bool by_keys = travel == Travel::keys;
    const auto gradients = by_keys ? std::span<const TensorRows>(key_gradients)
                                   : std::span<const TensorRows>(query_gradients);
    if (!by_keys) begin();  // row statistics travel, too
    const auto step = [&](int s) {
      if (s == 0 && by_keys) begin();
      if (s > 0) compute("clear", s, [&] { returns->clear(s); });
      stage(s);
      if (s == 0) return;
      returns->finish(gradients);  // of step s-1: they arrived while this step computed
      returns->begin(s);
      if (options.blocking) returns->finish(gradients);
    };
    if (by_keys) {
      run_steps(*key_courier, key_sections, key_plan->steps(), step);
    } else {
      run_steps(*query_courier, query_sections, query_plan->steps(), step);
    }
    returns->finish(gradients);
  }
  compute("finish", -1, [&] { engine->finish_backward(call, *queue); });
}

}  // namespace annulus
