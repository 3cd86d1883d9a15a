#pragma once

#include <memory>
#include <vector>

#include "annulus/ring_attention.h"
#include "cli/tensors.h"
#include "core/memory.h"
#include "kernels/backend.h"

namespace annulus::cli {

// A rank's shards in the memory of its device: on the CPU, views of the host's tensors; on a GPU,
// dense copies.
class DeviceTensors {
 public:
  DeviceTensors(const RingOptions& options, const JobTensors& host, int rank);

  TensorView q, k, v, o, lse;
  TensorView dout, dq, dk, dv;  // empty without backward

  // Both return when the copies are done. Results are initialised with NaN, so that a row that is
  // never written is noticed: device memory may still hold the right results of an earlier job.
  void upload();
  void download();

 private:
  struct Image {
    TensorView host;  // distance of batch entries; the shard of one entry is dense
    Memory memory;

    [[nodiscard]] std::int64_t entry_bytes() const;  // of one batch entry
    [[nodiscard]] std::byte* host_entry(std::int64_t batch) const;
  };
  [[nodiscard]] TensorView place(const RingTensor& tensor, const TokenOrder& order, int rank,
                                 const char* name, std::vector<Image>& images);

  std::shared_ptr<Backend> backend_;  // null: nothing is copied
  std::shared_ptr<Queue> queue_;
  std::vector<Image> inputs_;
  std::vector<Image> results_;
};

}  // namespace annulus::cli
