#include "support/ring_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <mutex>
#include <random>
#include <stdexcept>

#include "annulus/error.h"
#include "annulus/half.h"
#include "annulus/in_process.h"
#include "support/late_backend.h"
#include "support/random_plans.h"

namespace annulus::test {
namespace {

// ANNULUS_TEST_BACKEND=late runs a whole test program on late queues.
[[maybe_unused]] const std::unique_ptr<LateBackends> kLateBackends = [] {
  const char* name = std::getenv("ANNULUS_TEST_BACKEND");
  return name != nullptr && std::string(name) == "late" ? std::make_unique<LateBackends>()
                                                        : nullptr;
}();

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::byte kGap{0xA5};
constexpr double kFloatLimit = 1e-6;
constexpr double kCudaFloatLimit = 2e-6;
constexpr double kLseLimit = 2e-6;
constexpr double kHalfLimit = 2.0;
// A typical rounding is 0.4 of half a unit in the last place, relative to the result, of which the
// scale is two to three times as much.
constexpr double kLeastRounding = 0.1;

float round_to(DType dtype, double value) {
  const auto narrow = static_cast<float>(value);
  switch (dtype) {
    case DType::bf16:
      return bf16_to_float(float_to_bf16(narrow));
    case DType::f16:
      return f16_to_float(float_to_f16(narrow));
    default:
      return narrow;
  }
}

// Sums of squares where both sides are finite; infinite where they disagree about that.
double difference_rms(std::span<const float> actual, std::span<const double> expected) {
  if (actual.size() != expected.size()) return kInfinity;
  double sum = 0;
  double count = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double a = actual[i];
    const double e = expected[i];
    if (!std::isfinite(e)) {
      if (std::isnan(e) ? !std::isnan(a) : a != e) return kInfinity;
      continue;
    }
    if (!std::isfinite(a)) return kInfinity;
    sum += (a - e) * (a - e);
    count += 1;
  }
  return count > 0 ? std::sqrt(sum / count) : 0.0;
}

double ratio(double numerator, double denominator) {
  if (numerator == 0) return 0;
  return denominator > 0 ? numerator / denominator : kInfinity;
}

ShardTensor shard_tensor(const RingOptions& options, int rank, int heads, Layout layout) {
  return {options.dtype, options.batch,    options.placement.local_tokens(rank),
          heads,         options.head_dim, layout};
}

struct Worst {
  std::mutex mutex;
  std::map<std::string, std::pair<double, std::string>> values;
};

Worst& worst() {
  static Worst instance;
  return instance;
}

class PrintWorst : public ::testing::Environment {
 public:
  void TearDown() override {
    for (const auto& [what, entry] : worst().values) {
      std::printf("[  WORST   ] %s: %.3g (%s)\n", what.c_str(), entry.first, entry.second.c_str());
    }
  }
};

const ::testing::Environment* const kPrintWorst =
    ::testing::AddGlobalTestEnvironment(new PrintWorst);

}  // namespace

Inputs random_inputs(const Problem& problem, std::uint64_t seed, double deviation) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(0.0, deviation);
  const reference::Shape& s = problem.shape;
  const auto make = [&](int heads) {
    std::vector<double> values(static_cast<std::size_t>(s.batch * s.tokens * heads * s.head_dim));
    for (double& x : values) x = round_to(problem.dtype, normal(engine));
    return values;
  };
  Inputs inputs;
  inputs.q = make(s.q_heads);
  inputs.k = make(s.kv_heads);
  inputs.v = make(s.kv_heads);
  inputs.dout = make(s.q_heads);
  return inputs;
}

namespace {

// Backward's delta = rowsum(dO * O) comes from the o that forward has written. An error e of delta
// changes dS by -P e; the reference itself gives the sums over P that this changes: O with V = K,
// and dV with dO = e Q.
reference::Gradients gradients_from_rounded_output(const Problem& p, const Inputs& in,
                                                   const Expected& expected) {
  reference::Gradients gradients = expected.gradients;
  if (p.mix == MixGradient::detached) return gradients;  // its deltas come from fp32 branch outputs
  const auto dim = static_cast<std::size_t>(p.shape.head_dim);
  const double scale = p.scale.value_or(1.0 / std::sqrt(p.shape.head_dim));
  const std::vector<double> mean_key =
      reference::forward(p.pattern, p.shape, in.q, in.k, in.k, p.scale).o;
  std::vector<double> error_times_q = in.q;
  for (std::size_t row = 0; row < in.q.size(); row += dim) {
    double error = 0;
    for (std::size_t i = row; i < row + dim; ++i) {
      error += in.dout[i] * (round_to(p.dtype, expected.output.o[i]) - expected.output.o[i]);
    }
    for (std::size_t i = row; i < row + dim; ++i) {
      gradients.dq[i] -= scale * error * mean_key[i] / p.pattern.output_scale;
      error_times_q[i] *= scale * error / p.pattern.output_scale;
    }
  }
  const reference::Gradients change =
      reference::backward(p.pattern, p.shape, in.q, in.k, in.v, error_times_q, p.mix, p.scale);
  for (std::size_t i = 0; i < gradients.dk.size(); ++i) gradients.dk[i] -= change.dv[i];
  return gradients;
}

}  // namespace

Expected reference_of(const Problem& p, const Inputs& in) {
  Expected expected{
      reference::forward(p.pattern, p.shape, in.q, in.k, in.v, p.scale),
      reference::backward(p.pattern, p.shape, in.q, in.k, in.v, in.dout, p.mix, p.scale),
      reference::error_scales(p.pattern, p.shape, in.q, in.k, in.v, in.dout, p.mix, p.scale),
      {}};
  if (p.dtype == DType::f32) return expected;
  const reference::Gradients gradients = gradients_from_rounded_output(p, in, expected);
  expected.one_piece = {rounded(expected.output.o, p.dtype),
                        rounded(expected.output.lse, DType::f32), rounded(gradients.dq, p.dtype),
                        rounded(gradients.dk, p.dtype), rounded(gradients.dv, p.dtype)};
  return expected;
}

std::vector<const std::vector<float>*> members(const Results& r) {
  return {&r.o, &r.lse, &r.dq, &r.dk, &r.dv};
}

std::vector<const std::vector<double>*> members(const Expected& e) {
  return {&e.output.o, &e.output.lse, &e.gradients.dq, &e.gradients.dk, &e.gradients.dv};
}

std::string first_difference(const Results& a, const Results& b) {
  const auto left = members(a);
  const auto right = members(b);
  for (std::size_t m = 0; m < left.size(); ++m) {
    const std::string name = kResultNames[m];
    if (left[m]->size() != right[m]->size()) return name + " has another size";
    std::size_t different = 0;
    std::size_t first = 0;
    for (std::size_t i = 0; i < left[m]->size(); ++i) {
      const float x = (*left[m])[i];
      const float y = (*right[m])[i];
      if (std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y) ||
          (std::isnan(x) && std::isnan(y)))
        continue;
      if (different++ == 0) first = i;
    }
    if (different == 0) continue;
    char text[160];
    std::snprintf(text, sizeof(text),
                  "%s differs in %zu of %zu elements, first [%zu]: %.9g and %.9g", name.c_str(),
                  different, left[m]->size(), first, static_cast<double>((*left[m])[first]),
                  static_cast<double>((*right[m])[first]));
    return text;
  }
  return "";
}

ShardTensor::ShardTensor(DType dtype, std::int64_t batch, std::int64_t tokens, std::int64_t heads,
                         std::int64_t dim, Layout layout) {
  const std::int64_t width = dim == 0 ? 1 : dim;
  std::int64_t start = 0;
  std::int64_t head = width;
  std::int64_t token = heads * width;
  std::int64_t entry = tokens * heads * width;
  if (layout == Layout::heads_major) {
    token = width;
    head = tokens * width;
  } else if (layout == Layout::padded) {
    start = 3;
    head = width + 3;
    token = heads * head + 5;
    entry = tokens * token + 7;
  }
  const std::int64_t elements = tokens == 0 ? 0 : start + batch * entry + 9;
  bytes_.assign(static_cast<std::size_t>(elements) * size_of(dtype), kGap);
  void* const data =
      elements == 0 ? nullptr : bytes_.data() + static_cast<std::size_t>(start) * size_of(dtype);
  host_ = data;
  view_ = dim == 0 ? TensorView(data, dtype, {batch, tokens, heads})
                   : TensorView(data, dtype, {batch, tokens, heads, dim});
  view_.stride[0] = entry;
  view_.stride[1] = token;
  view_.stride[2] = head;
  if (dim != 0) view_.stride[3] = 1;
  if (test_device().kind == Device::Kind::cpu) return;
  view_.device = test_device();
  if (elements == 0) return;
  image_ = std::make_unique<DeviceImage>(bytes_);
  view_.data = image_->data() + start * static_cast<std::int64_t>(size_of(dtype));
}

void ShardTensor::upload() const {
  if (image_ != nullptr) image_->upload();
}

void ShardTensor::download() const {
  if (image_ != nullptr) image_->download();
}

std::int64_t ShardTensor::index(std::int64_t b, std::int64_t t, std::int64_t h,
                                std::int64_t d) const {
  return b * view_.stride[0] + t * view_.stride[1] + h * view_.stride[2] + d;
}

template <typename Body>
void ShardTensor::for_each_element(const Body& body) const {
  const std::int64_t dim = view_.rank == 4 ? view_.shape[3] : 1;
  for (std::int64_t b = 0; b < view_.shape[0]; ++b) {
    for (std::int64_t t = 0; t < view_.shape[1]; ++t) {
      for (std::int64_t h = 0; h < view_.shape[2]; ++h) {
        for (std::int64_t d = 0; d < dim; ++d) body(index(b, t, h, d));
      }
    }
  }
}

float ShardTensor::get(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d) const {
  return load_element(host_, view_.dtype, index(b, t, h, d));
}

void ShardTensor::set(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d, float value) {
  store_element(host_, view_.dtype, index(b, t, h, d), value);
}

void ShardTensor::fill(float value) {
  for_each_element([&](std::int64_t i) { store_element(host_, view_.dtype, i, value); });
}

bool ShardTensor::gaps_untouched() const {
  std::vector<bool> used(bytes_.size(), false);
  const std::size_t size = size_of(view_.dtype);
  const auto start =
      host_ == nullptr
          ? 0
          : static_cast<std::size_t>(static_cast<const std::byte*>(host_) - bytes_.data());
  for_each_element([&](std::int64_t i) {
    for (std::size_t byte = 0; byte < size; ++byte) {
      used[start + static_cast<std::size_t>(i) * size + byte] = true;
    }
  });
  for (std::size_t i = 0; i < bytes_.size(); ++i) {
    if (!used[i] && bytes_[i] != kGap) return false;
  }
  return true;
}

Shard::Shard(const RingOptions& options, int rank, Layout layout)
    : positions(options.placement.positions(rank)),
      batch(options.batch),
      tokens(options.placement.tokens()),
      detached(options.mix_gradient == MixGradient::detached),
      q(shard_tensor(options, rank, options.pattern.heads, layout)),
      k(shard_tensor(options, rank, options.kv_heads, layout)),
      v(shard_tensor(options, rank, options.kv_heads, layout)),
      o(shard_tensor(options, rank, options.pattern.heads, layout)),
      lse(DType::f32, batch, std::ssize(positions), options.pattern.heads, 0, layout),
      dout(shard_tensor(options, rank, options.pattern.heads, layout)),
      dq(shard_tensor(options, rank, options.pattern.heads, layout)),
      dk(shard_tensor(options, rank, options.kv_heads, layout)),
      dv(shard_tensor(options, rank, options.kv_heads, layout)) {}

void Shard::load(const Inputs& inputs) {
  const auto copy = [&](const std::vector<double>& from, ShardTensor& to) {
    const std::int64_t heads = to.view().shape[2];
    const std::int64_t dim = to.view().shape[3];
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::size_t t = 0; t < positions.size(); ++t) {
        for (std::int64_t h = 0; h < heads; ++h) {
          const std::int64_t at = ((b * tokens + positions[t]) * heads + h) * dim;
          for (std::int64_t d = 0; d < dim; ++d) {
            to.set(b, static_cast<std::int64_t>(t), h, d,
                   static_cast<float>(from[static_cast<std::size_t>(at + d)]));
          }
        }
      }
    }
  };
  copy(inputs.q, q);
  copy(inputs.k, k);
  copy(inputs.v, v);
  copy(inputs.dout, dout);
  for (ShardTensor* out : {&o, &lse, &dq, &dk, &dv}) {
    out->fill(std::numeric_limits<float>::quiet_NaN());
  }
  loaded_ = {q.bytes(), k.bytes(), v.bytes(), dout.bytes()};
}

void Shard::forward(RingAttention& ring) {
  if (detached && (positions.size() % 2 == 0 || test_device().kind != Device::Kind::cpu)) {
    state = ring.make_branch_state();
  } else if (detached) {  // the same in memory of our own, which is all that backward then gets
    state_lse_.resize(static_cast<std::size_t>(ring.branch_state_rows()));
    state_o_.resize(state_lse_.size() * static_cast<std::size_t>(ring.options().head_dim) *
                    size_of(ring.options().dtype));
    state = ring.make_branch_state(state_o_, state_lse_, false);
  }
  for (const ShardTensor* tensor : {&q, &k, &v, &o, &lse}) tensor->upload();
  ring.forward(q.view(), k.view(), v.view(), o.view(), lse.view(), detached ? &state : nullptr);
  ring.synchronize();
  for (const ShardTensor* tensor : {&q, &k, &v, &o, &lse}) tensor->download();
}

void Shard::backward(RingAttention& ring) {
  if (!state_o_.empty()) state = ring.make_branch_state(state_o_, state_lse_, true);
  for (const ShardTensor* tensor : {&o, &lse, &dout, &dq, &dk, &dv}) tensor->upload();
  ring.backward(q.view(), k.view(), v.view(), o.view(), lse.view(), dout.view(), dq.view(),
                dk.view(), dv.view(), detached ? &state : nullptr);
  ring.synchronize();
  for (const ShardTensor* tensor : {&q, &k, &v, &dout, &dq, &dk, &dv}) tensor->download();
}

void Shard::collect(Results& results) const {
  const auto copy = [&](const ShardTensor& from, std::vector<float>& to) {
    const std::int64_t heads = from.view().shape[2];
    const std::int64_t dim = from.view().rank == 4 ? from.view().shape[3] : 1;
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::size_t t = 0; t < positions.size(); ++t) {
        for (std::int64_t h = 0; h < heads; ++h) {
          const std::int64_t at = ((b * tokens + positions[t]) * heads + h) * dim;
          for (std::int64_t d = 0; d < dim; ++d) {
            to[static_cast<std::size_t>(at + d)] = from.get(b, static_cast<std::int64_t>(t), h, d);
          }
        }
      }
    }
  };
  copy(o, results.o);
  copy(lse, results.lse);
  copy(dq, results.dq);
  copy(dk, results.dk);
  copy(dv, results.dv);
}

std::string Shard::damage() const {
  const ShardTensor* const inputs[] = {&q, &k, &v, &dout};
  const char* const names[] = {"q", "k", "v", "dout"};
  for (std::size_t i = 0; i < 4; ++i) {
    if (inputs[i]->bytes() != loaded_[i]) return std::string(names[i]) + " was changed";
  }
  const ShardTensor* const outputs[] = {&o, &lse, &dq, &dk, &dv};
  for (std::size_t i = 0; i < 5; ++i) {
    if (!outputs[i]->gaps_untouched()) {
      return std::string("bytes between the rows of ") + kResultNames[i] + " were changed";
    }
  }
  return "";
}

RingOptions ring_options(const Problem& problem, Placement placement) {
  return {.pattern = problem.pattern,
          .placement = std::move(placement),
          .batch = problem.shape.batch,
          .kv_heads = problem.shape.kv_heads,
          .head_dim = problem.shape.head_dim,
          .dtype = problem.dtype,
          .scale = problem.scale,
          .mix_gradient = problem.mix,
          .limits = {},
          .device = test_device()};
}

Results empty_results(const RingOptions& options) {
  const std::int64_t rows = options.batch * options.placement.tokens();
  const auto queries = static_cast<std::size_t>(rows * options.pattern.heads * options.head_dim);
  const auto keys = static_cast<std::size_t>(rows * options.kv_heads * options.head_dim);
  Results results;
  results.o.resize(queries);
  results.lse.resize(static_cast<std::size_t>(rows * options.pattern.heads));
  results.dq.resize(queries);
  results.dk.resize(keys);
  results.dv.resize(keys);
  return results;
}

Results run_ring(const RingOptions& options, const Inputs& inputs, Layout layout) {
  Results results = empty_results(options);
  run_in_process(options.placement.ranks(), [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank(), layout);
    shard.load(inputs);
    shard.forward(ring);
    if (options.backward) shard.backward(ring);
    shard.collect(results);
    const std::string damage = shard.damage();
    if (!damage.empty()) throw std::runtime_error(damage);
  });
  return results;
}

std::vector<RankOutcome> run_ranks(int ranks, const std::function<void(Transport&)>& body) {
  // A rank that waits for another in vain does so for this long: tests notice, and need not wait a
  // minute.
  InProcessOptions options;
  options.deadline = std::chrono::milliseconds(static_cast<int>(5000 * slowness()));
  return run_ranks(make_in_process_ring(ranks, options), body);
}

std::vector<RankOutcome> run_ranks(std::span<const std::unique_ptr<Transport>> ring,
                                   const std::function<void(Transport&)>& body) {
  std::vector<RankOutcome> outcomes(ring.size());
  run_in_process(ring, [&](Transport& transport) {
    RankOutcome& outcome = outcomes[static_cast<std::size_t>(transport.rank())];
    const auto start = std::chrono::steady_clock::now();
    const auto end_as = [&](const char* kind, const char* message) {
      outcome.kind = kind;
      outcome.message = message;
    };
    try {
      body(transport);
    } catch (const ConfigError& error) {
      end_as("ConfigError", error.what());
    } catch (const TransportError& error) {
      end_as("TransportError", error.what());
      outcome.lost_rank = error.rank();
    } catch (const DeviceError& error) {
      end_as("DeviceError", error.what());
    } catch (const std::exception& error) {
      end_as("other", error.what());
    }
    outcome.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  });
  return outcomes;
}

void expect_everywhere(const std::vector<RankOutcome>& outcomes, const std::string& kind,
                       const std::vector<std::string>& texts) {
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    const RankOutcome& outcome = outcomes[rank];
    EXPECT_EQ(outcome.kind, kind) << "rank " << rank << ": " << outcome.message;
    EXPECT_LT(outcome.seconds, 1.0 * slowness()) << "rank " << rank;
    for (const std::string& text : texts) {
      EXPECT_NE(outcome.message.find(text), std::string::npos)
          << "rank " << rank << " says '" << outcome.message << "', without '" << text << "'";
    }
  }
}

WatchedTransport::Count WatchedTransport::sent(std::uint32_t tag) const {
  Count sum;
  for (const auto& [key, count] : sent_) {
    if (key.first != tag) continue;
    sum.bytes += count.bytes;
    sum.messages += count.messages;
  }
  return sum;
}

std::unique_ptr<Ticket> WatchedTransport::post(std::span<const Message> messages,
                                               const Event& after) {
  for (const Message& message : messages) {
    if (message.way == Way::receive) continue;
    if (fail_after_ >= 0 && message.tag == fail_tag_ && fail_after_-- == 0) {
      throw std::runtime_error("rank failure for the test");
    }
    Count& count = sent_[{message.tag, message.peer}];
    count.bytes += message.bytes;
    count.messages += 1;
  }
  return inner().post(messages, after);
}

double rms(std::span<const double> values) {
  double sum = 0;
  double count = 0;
  for (const double x : values) {
    if (!std::isfinite(x)) continue;
    sum += x * x;
    count += 1;
  }
  return count > 0 ? std::sqrt(sum / count) : 0.0;
}

double relative_rms(std::span<const float> actual, std::span<const double> expected, double floor) {
  return ratio(difference_rms(actual, expected), std::max(rms(expected), floor));
}

std::vector<float> rounded(std::span<const double> values, DType dtype) {
  std::vector<float> out(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) out[i] = round_to(dtype, values[i]);
  return out;
}

namespace {

// A log-sum-exp is a logarithm: 1 is its natural unit.
std::array<double, 5> scales_of(const Expected& expected) {
  const reference::Scales& s = expected.scales;
  return {rms(s.o), std::max(1.0, rms(expected.output.lse)), rms(s.dq), rms(s.dk), rms(s.dv)};
}

}  // namespace

Errors errors_of(const Results& results, const Expected& expected) {
  const auto actual = members(results);
  const auto wanted = members(expected);
  const std::array<double, 5> scales = scales_of(expected);
  Errors errors;
  for (std::size_t m = 0; m < 5; ++m) {
    errors.value[m] = ratio(difference_rms(*actual[m], *wanted[m]), scales[m]);
  }
  return errors;
}

Errors error_ratios(const Problem& problem, const Results& results, const Expected& expected) {
  const auto actual = members(results);
  const auto one_piece = members(expected.one_piece);
  const auto wanted = members(expected);
  const std::array<double, 5> scales = scales_of(expected);
  // For problems whose gradients vanish, or happen to be representable.
  const double least = kLeastRounding * (problem.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11);
  Errors errors;
  for (std::size_t m = 0; m < 5; ++m) {
    const double error = difference_rms(*actual[m], *wanted[m]);
    // lse is fp32 whatever the dtype of the rest.
    errors.value[m] =
        m == 1
            ? ratio(error, scales[m])
            : ratio(error, std::max(difference_rms(*one_piece[m], *wanted[m]), least * scales[m]));
  }
  return errors;
}

void expect_matches(const Problem& problem, const Results& results, const Expected& expected) {
  const bool wide = problem.dtype == DType::f32;
  const Errors errors =
      wide ? errors_of(results, expected) : error_ratios(problem, results, expected);
  for (std::size_t m = 0; m < 5; ++m) {
    const bool is_lse = m == 1;
    const double float_limit =
        test_device().kind == Device::Kind::cpu ? kFloatLimit : kCudaFloatLimit;
    const double limit = is_lse ? kLseLimit : wide ? float_limit : kHalfLimit;
    const char* const measure = wide || is_lse ? "relative RMS error" : "error / one-piece error";
    EXPECT_LE(errors.value[m], limit) << kResultNames[m] << ": " << measure;
    note_worst(std::string(name_of(problem.dtype)) + " " + kResultNames[m] + " " + measure,
               errors.value[m]);
  }
}

void note_worst(const std::string& what, double value) {
  const std::lock_guard lock(worst().mutex);
  auto& entry = worst().values[what];
  if (!(value > entry.first)) return;
  entry.first = value;
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  entry.second = info != nullptr ? info->name() : "";
}

Placement placement_of(const std::string& name, std::int64_t tokens, int ranks,
                       std::uint64_t seed) {
  if (name == "aligned") return Placement::contiguous(tokens, ranks, 16);
  if (name == "explicit") {
    Random random(seed);
    return random_placement(random, tokens, ranks);
  }
  return Placement::named(name, tokens, ranks);
}

Problem make_problem(std::string name, Pattern pattern, int kv_heads, std::int64_t tokens,
                     int head_dim, std::int64_t batch, MixGradient mix) {
  Problem problem;
  problem.name = std::move(name);
  problem.shape = {batch, tokens, pattern.heads, kv_heads, head_dim};
  problem.pattern = std::move(pattern);
  problem.mix = mix;
  return problem;
}

std::uint64_t seed_of(const std::string& name) {
  std::uint64_t hash = 14695981039346656037U;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211U;
  return hash % 1'000'000;
}

double slowness() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return 20.0;
#else
  return 1.0;
#endif
}

}  // namespace annulus::test
