#include "kernels/cpu/backend.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/thread_pool.h"
#include "kernels/cpu/cached_rows.h"
#include "kernels/cpu/engine.h"
#include "kernels/cpu/kernel.h"

namespace annulus::cpu {
namespace {

// Runs work when it is enqueued.
class CpuQueue final : public Queue {
 public:
  [[nodiscard]] Device device() const override { return {}; }
  [[nodiscard]] Event record() override { return {}; }
  void wait(const Event& event) override { event.wait(); }
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) override {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
};

// Copies in stretches of rows, short enough that one head of one sequence keeps all threads busy.
class CpuCopies final : public CopyProgram {
 public:
  CpuCopies(const ParcelLayout& layout_in, std::vector<ParcelCopy> copies)
      : layout(&layout_in), parcels(std::move(copies)) {
    constexpr std::int64_t kRows = 512;
    for (const ParcelCopy& parcel : parcels) {
      std::vector<Stretch>& cut = stretches.emplace_back();
      std::int64_t rows = kRows;  // of the last stretch
      for (std::size_t run = 0; run < parcel.runs->size(); ++run) {
        for (std::int64_t first = 0; first < (*parcel.runs)[run].count;) {
          if (rows >= kRows) {
            cut.push_back({run, first, 0});
            rows = 0;
          }
          const std::int64_t take = std::min(kRows - rows, (*parcel.runs)[run].count - first);
          cut.back().rows += take;
          rows += take;
          first += take;
        }
      }
    }
  }

  [[nodiscard]] std::int64_t bytes() const override {
    std::size_t sum = 0;
    for (const std::vector<Stretch>& cut : stretches) sum += cut.size() * sizeof(Stretch);
    for (const ParcelCopy& parcel : parcels) {
      // Copies of one parcel share its runs, so each counts its share of their memory.
      sum +=
          sizeof(ParcelCopy) + parcel.runs->size() * sizeof(CopyRun) /
                                   static_cast<std::size_t>(std::max(1L, parcel.runs.use_count()));
    }
    return static_cast<std::int64_t>(sum);
  }

  // `rows` rows, from row `first` of run `run` on; continues into the next runs.
  struct Stretch {
    std::size_t run;
    std::int64_t first;
    std::int64_t rows;
  };

  // Calls rows(section, batch, head, run, first, end, base, step): rows [first, end) of the run,
  // in a section that begins `base` bytes into the buffer and has a row every `step` bytes.
  template <typename Row>
  void for_each(ThreadPool& pool, const Row& row) const {
    for (std::size_t p = 0; p < parcels.size(); ++p) {
      const ParcelCopy& parcel = parcels[p];
      const std::vector<int>& units = layout->units(parcel.parcel);
      const auto unit_count = static_cast<std::int64_t>(units.size());
      const auto cuts = static_cast<std::int64_t>(stretches[p].size());
      const std::int64_t first_entry = layout->first_entry(parcel.parcel);
      const std::int64_t entries = layout->entries(parcel.parcel);
      pool.run_parallel(entries * unit_count * cuts, [&](std::int64_t index, int) {
        const Stretch& stretch = stretches[p][static_cast<std::size_t>(index % cuts)];
        const int unit = static_cast<int>(index / cuts % unit_count);
        const std::int64_t batch = first_entry + index / cuts / unit_count;
        for (int s = 0; s < layout->sections(); ++s) {
          const std::int64_t step = layout->section_bytes(s);
          const std::int64_t base = parcel.offset + layout->offset(parcel.parcel, batch, unit, s);
          std::int64_t left = stretch.rows;
          std::int64_t first = stretch.first;
          for (std::size_t r = stretch.run; left > 0; ++r, first = 0) {
            const CopyRun& run = (*parcel.runs)[r];
            const std::int64_t end = std::min(run.count, first + left);
            left -= end - first;
            row(s, batch, units[static_cast<std::size_t>(unit)], run, first, end, base, step);
          }
        }
      });
    }
  }

  const ParcelLayout* layout;
  std::vector<ParcelCopy> parcels;
  std::vector<std::vector<Stretch>> stretches;  // per parcel
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int threads) : kernels_(chosen_kernels()), pool_(ThreadPool::of(threads)) {}

  [[nodiscard]] Device device() const override { return {}; }
  [[nodiscard]] std::string kernels() const override { return kernels_.name; }
  [[nodiscard]] std::int64_t scratch_bytes() const override {
    return static_cast<std::int64_t>(ThreadPool::kScratchBytes) * pool_->threads();
  }

  [[nodiscard]] std::string complaint(const Computation&) const override { return ""; }

  [[nodiscard]] Memory allocate(std::int64_t bytes, const char* what) override {
    return allocate_host(bytes, what);
  }
  [[nodiscard]] Memory allocate_staging(std::int64_t bytes, const char* what) override {
    return allocate_host(bytes, what);
  }
  [[nodiscard]] std::shared_ptr<Queue> make_queue() override {
    return std::make_shared<CpuQueue>();
  }
  [[nodiscard]] bool immediate() const override { return true; }

  [[nodiscard]] std::unique_ptr<Engine> compile(const Computation& computation,
                                                std::span<const Stage> forward,
                                                std::span<const Stage> backward) override {
    return std::make_unique<CpuEngine>(computation, forward, backward, kernels_, pool_);
  }
  [[nodiscard]] std::unique_ptr<CopyProgram> compile(const ParcelLayout& layout,
                                                     std::vector<ParcelCopy> copies,
                                                     Queue&) override {
    return std::make_unique<CpuCopies>(layout, std::move(copies));
  }

  void pack(const CopyProgram& program, std::span<const TensorRows> sections, std::byte* buffer,
            Queue&) override {
    const auto& copies = static_cast<const CpuCopies&>(program);
    copies.for_each(
        *pool_, [&](int section, std::int64_t batch, int head, const CopyRun& run,
                    std::int64_t first, std::int64_t end, std::int64_t base, std::int64_t step) {
          const TensorRows& rows = sections[static_cast<std::size_t>(section)];
          const std::byte* from = rows.at(batch, head);
          const auto bytes = static_cast<std::size_t>(copies.layout->content_bytes(section));
          const std::size_t padding = static_cast<std::size_t>(step) - bytes;
          for (std::int64_t r = first; r < end; ++r) {
            std::byte* to = buffer + base + (run.parcel_first + r * run.parcel_stride) * step;
            std::memcpy(to, from + (run.local_first + r * run.local_stride) * rows.row_step, bytes);
            if (padding > 0) std::memset(to + bytes, 0, padding);
          }
        });
  }

  void add(const CopyProgram& program, const std::byte* buffer,
           std::span<const TensorRows> sections, Queue&) override {
    const auto& copies = static_cast<const CpuCopies&>(program);
    copies.for_each(
        *pool_, [&](int section, std::int64_t batch, int head, const CopyRun& run,
                    std::int64_t first, std::int64_t end, std::int64_t base, std::int64_t step) {
          const TensorRows& rows = sections[static_cast<std::size_t>(section)];
          std::byte* target = rows.at(batch, head);
          const std::int64_t width =
              copies.layout->content_bytes(section) / static_cast<std::int64_t>(sizeof(float));
          for (std::int64_t r = first; r < end; ++r) {
            const auto* term = reinterpret_cast<const float*>(
                buffer + base + (run.parcel_first + r * run.parcel_stride) * step);
            auto* sum = reinterpret_cast<float*>(target + (run.local_first + r * run.local_stride) *
                                                              rows.row_step);
            for (std::int64_t d = 0; d < width; ++d) sum[d] += term[d];
          }
        });
  }

  void clear(std::byte* memory, std::int64_t bytes, Queue&) override {
    constexpr std::int64_t kPiece = 1 << 20;
    pool_->run_parallel((bytes + kPiece - 1) / kPiece, [&](std::int64_t i, int) {
      std::memset(memory + i * kPiece, 0,
                  static_cast<std::size_t>(std::min(kPiece, bytes - i * kPiece)));
    });
  }

  [[nodiscard]] std::unique_ptr<CacheKernels> cache_kernels(const CacheShape& shape) override {
    return make_cache_kernels(shape, kernels_, pool_);
  }

 private:
  const Kernels&
      kernels_;  // before pool_: it may ask the system for tiles, which must precede threads
  std::shared_ptr<ThreadPool> pool_;
};

}  // namespace

std::shared_ptr<Backend> make_backend(int threads) { return std::make_shared<CpuBackend>(threads); }

}  // namespace annulus::cpu
