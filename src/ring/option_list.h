#pragma once

#include "annulus/ring_attention.h"

namespace annulus::ring {

// How an option is known to people, and whether all ranks must have the same.
struct OptionInfo {
  const char* name;  // as in Python and, with dashes, on the command line
  bool agreed;
};

// Every option of an executor but its pattern and placement, once: what the ranks compare, what
// tells executors apart in a cache, and what bindings offer all follow from this list.
template <typename Options, typename Visit>
void for_each_option(Options& options, const Visit& visit) {
  visit(OptionInfo{"batch", true}, options.batch);
  visit(OptionInfo{"kv_heads", true}, options.kv_heads);
  visit(OptionInfo{"head_dim", true}, options.head_dim);
  visit(OptionInfo{"dtype", true}, options.dtype);
  visit(OptionInfo{"scale", true}, options.scale);
  visit(OptionInfo{"mix_gradient", true}, options.mix_gradient);
  visit(OptionInfo{"reproducible", true}, options.reproducible);
  visit(OptionInfo{"backward", true}, options.backward);
  visit(OptionInfo{"blocking", false}, options.blocking);
  // These have a say in what `automatic` chooses; the choice is what the ranks compare.
  visit(OptionInfo{"schedule", false}, options.schedule);
  visit(OptionInfo{"min_tokens_for_ring", false}, options.min_tokens_for_ring);
  visit(OptionInfo{"backward_travel", false}, options.backward_travel);
  visit(OptionInfo{"max_communication_bytes", false}, options.limits.communication_bytes);
  visit(OptionInfo{"max_qkv_elements", false}, options.limits.qkv_elements);
  visit(OptionInfo{"flops_per_second", false}, options.rates.flops_per_second);
  visit(OptionInfo{"bytes_per_second", false}, options.rates.bytes_per_second);
  visit(OptionInfo{"device", false}, options.device);
  visit(OptionInfo{"threads", false}, options.threads);
}

}  // namespace annulus::ring
