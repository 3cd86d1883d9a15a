#include "kernels/cuda/portable/tiles.h"

#include <charconv>
#include <cstdlib>
#include <limits>
#include <string_view>

#include <fmt/format.h>

#include "annulus/error.h"

namespace annulus::cuda {

Fp32Tile fp32_tile(int head_dim, bool backward, std::size_t shared_bytes) {
  const std::span<const Fp32Tile> tiles = fp32_tiles(backward);
  for (const Fp32Tile& tile : tiles) {
    if (fp32_shared_bytes(tile, head_dim, backward) <= shared_bytes) return tile;
  }
  return tiles.back();
}

std::size_t allowed_shared_bytes() {
  const char* text = std::getenv("ANNULUS_CUDA_SHARED_KB");
  if (text == nullptr || *text == '\0') return std::numeric_limits<std::size_t>::max();
  const std::string_view view = text;
  std::size_t kilobytes = 0;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), kilobytes);
  if (error != std::errc() || end != view.data() + view.size() ||
      kilobytes < kLeastSharedBytes / 1024 || kilobytes > 1024) {
    throw ConfigError(
        fmt::format("ANNULUS_CUDA_SHARED_KB is '{}', expected a number from {} to 1024", view,
                    kLeastSharedBytes / 1024));
  }
  return kilobytes * 1024;
}

}  // namespace annulus::cuda
