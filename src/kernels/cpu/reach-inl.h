// Which tiles of keys a panel of queries sees, and which of them need masks. See simd-inl.h for how
// this file is included.

namespace annulus::cpu::ANNULUS_ISA {

// The keys of one tile (kRows of them).
struct TileKeys {
  std::int32_t first = kMaskedIndex;  // over keys, without padding
  std::int32_t last = -1;
  bool padded = false;  // it has padding
};

inline TileKeys tile_keys(const std::int32_t* index) {
  TileKeys tile;
  for (int i = 0; i < kRows; ++i) {
    tile.padded |= index[i] == kMaskedIndex;
    tile.first = std::min(tile.first, index[i]);
    if (index[i] != kMaskedIndex) tile.last = std::max(tile.last, index[i]);
  }
  return tile;
}

// Over the queries of a panel.
struct PanelLimits {
  std::int32_t min_before;
  std::int32_t max_before;
  std::int32_t min_last;
  std::int32_t max_last;
  std::int32_t max_last0;  // over the first vector

  // Every query sees every key.
  [[nodiscard]] bool see_all(const TileKeys& tile) const {
    return !tile.padded && tile.last <= min_last && tile.first > max_before;
  }
};

inline PanelLimits panel_limits(const LaneLimits& queries) {
  return {*std::min_element(queries.before, queries.before + kPanel),
          *std::max_element(queries.before, queries.before + kPanel),
          *std::min_element(queries.last, queries.last + kPanel),
          *std::max_element(queries.last, queries.last + kPanel),
          *std::max_element(queries.last, queries.last + kLanes)};
}

// Tiles [begin, first_end) are visible to both vectors of a panel, [first_end, end) only to the
// second.
struct Reach {
  int begin = 0;
  int first_end = 0;
  int end = 0;

  [[nodiscard]] bool empty() const { return begin == end; }
};

inline Reach reach(const PanelLimits& queries, const TileKeys* tiles, int count) {
  Reach out{0, 0, count};
  while (out.end > 0 && tiles[out.end - 1].first > queries.max_last) --out.end;
  while (out.begin < out.end && tiles[out.begin].last <= queries.min_before) ++out.begin;
  if (out.begin == out.end) return {};
  out.first_end = out.end;
  while (out.first_end > out.begin && tiles[out.first_end - 1].first > queries.max_last0)
    --out.first_end;
  return out;
}

}  // namespace annulus::cpu::ANNULUS_ISA
