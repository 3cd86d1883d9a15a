#pragma once

#include <cstdint>

#include "annulus/ring_attention.h"
#include "kernels/head_dim.h"

namespace annulus::ring {

// How ranks compare an option.
enum class Shared : std::uint8_t {
  same,    // must be equal on all ranks
  choice,  // an input of what `automatic` chooses: the ranks compare the choice instead
  own,     // may differ between ranks
};

// The section of --help that lists it.
enum class Topic : std::uint8_t { pattern, shape, ring, limits, execution };

// How an option appears to users.
struct OptionInfo {
  const char* name;  // in Python and, with dashes, on the command line
  Shared shared;
  Topic topic;
  const char* help;        // one line
  const char* value = "";  // the placeholder of its value in help
  std::int64_t least = 0;  // bounds of whole numbers
  std::int64_t most = INT64_MAX;
};

// Every option of an executor except its pattern and placements. The claims of the agreement, cache
// keys, the tool's flags and the arguments in Python all follow from this list. A bool whose
// default is true is --no-<name> on the command line.
template <typename Options, typename Visit>
void for_each_option(Options& options, const Visit& visit) {
  using enum Shared;
  using enum Topic;
  visit(OptionInfo{"batch", same, shape, "Sequences (default 1)", "B", 1, INT32_MAX},
        options.batch);
  visit(OptionInfo{"kv_heads", same, shape, "Key/value heads, a divisor of --heads (default H)",
                   "H2", 1, INT32_MAX},
        options.kv_heads);
  visit(OptionInfo{"head_dim", same, shape, "1 to 512 (default 64)", "D", 1, kMaxHeadDim},
        options.head_dim);
  visit(OptionInfo{"dtype", same, shape, "Compute in (default fp32, or what the files have)"},
        options.dtype);
  visit(OptionInfo{"mix_gradient", same, pattern,
                   "Exact gradient (default), or branch weights held constant"},
        options.mix_gradient);
  visit(OptionInfo{"scale", same, pattern, "Factor of q.k (default 1/sqrt(head dim))", "X"},
        options.scale);
  visit(OptionInfo{"softcap", same, pattern,
                   "Scores become X * tanh(score / X) before masks (default 0: they do not)", "X"},
        options.softcap);
  visit(OptionInfo{"dropout_p", same, pattern,
                   "Share of probabilities that dropout sets to 0 (default 0)", "P"},
        options.dropout_p);
  visit(OptionInfo{"schedule", choice, ring,
                   "Rows hop around, or go straight to who needs them (default auto)"},
        options.schedule);
  visit(OptionInfo{"reproducible", same, ring,
                   "The same bits for every number of ranks and placement (gathers)"},
        options.reproducible);
  visit(OptionInfo{"deterministic", same, ring,
                   "The same bits in every run (the CPU always does; CUDA backward slows down)"},
        options.deterministic);
  visit(OptionInfo{"backward_travel", choice, ring,
                   "What visits other ranks in backward (default auto: fewer bytes)"},
        options.backward_travel);
  visit(OptionInfo{"min_tokens_for_ring", choice, ring,
                   "Schedule auto gathers below this length (default 32768)", "N"},
        options.min_tokens_for_ring);
  visit(OptionInfo{"flops_per_second", choice, ring,
                   "Of one rank, by which schedule auto tells ring and gather apart (default 1e12)",
                   "X"},
        options.rates.flops_per_second);
  visit(OptionInfo{"bytes_per_second", choice, ring,
                   "Between two ranks, by which schedule auto does so (default 1e10)", "X"},
        options.rates.bytes_per_second);
  visit(
      OptionInfo{"max_communication_bytes", own, limits,
                 "Refuse jobs whose send and receive buffers are larger; 2GiB works, too", "BYTES"},
      options.limits.communication_bytes);
  visit(OptionInfo{"max_qkv_elements", own, limits,
                   "Refuse jobs whose q, k and v have more elements together", "COUNT"},
        options.limits.qkv_elements);
  visit(OptionInfo{"backward", same, execution, "Forward only"}, options.backward);
  visit(OptionInfo{"recover", same, execution,
                   "Out of memory is an error at once: nothing is split, no cache is dropped"},
        options.recover);
  visit(OptionInfo{"blocking", own, execution,
                   "For debugging: wait for each transfer where it is posted"},
        options.blocking);
  visit(OptionInfo{"device", own, execution, "Where to compute: cpu, cuda, cuda:1 (default cpu)",
                   "DEVICE"},
        options.device);
  visit(OptionInfo{"threads", own, execution,
                   "Threads that compute, over all ranks (default ANNULUS_THREADS or all)", "T", 0,
                   4096},
        options.threads);
}

}  // namespace annulus::ring
