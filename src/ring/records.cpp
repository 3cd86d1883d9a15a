#include "ring/records.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <span>

#include "ring/tags.h"

namespace annulus::ring {
namespace {

// All-gather of blocks of equal size. Block j of the result is that of rank (rank - j) modulo size.
// Dissemination: the number of known blocks doubles in every round.
std::vector<std::byte> gather_blocks(Transport& transport, std::span<const std::byte> mine) {
  const int rank = transport.rank();
  const int size = transport.size();
  const std::size_t width = mine.size();
  std::vector<std::byte> blocks(width * static_cast<std::size_t>(size));
  std::copy(mine.begin(), mine.end(), blocks.begin());
  for (int known = 1; known < size; known *= 2) {
    const std::size_t bytes = width * static_cast<std::size_t>(std::min(known, size - known));
    const std::span all(blocks);
    const auto receive =
        transport.receive((rank + size - known) % size, kTagRecords,
                          all.subspan(width * static_cast<std::size_t>(known), bytes));
    const auto send = transport.send((rank + known) % size, kTagRecords, all.first(bytes));
    receive->wait();
    send->wait();
  }
  return blocks;
}

std::vector<std::string> gather(Transport& transport, std::string_view mine) {
  const auto ranks = static_cast<std::size_t>(transport.size());
  const std::uint64_t my_size = mine.size();
  const std::vector<std::byte> size_blocks =
      gather_blocks(transport, std::as_bytes(std::span(&my_size, 1)));
  std::vector<std::uint64_t> sizes(ranks);
  std::memcpy(sizes.data(), size_blocks.data(), size_blocks.size());

  // Padded to the longest, because messages of one round have the same size on all ranks.
  const std::size_t width = *std::max_element(sizes.begin(), sizes.end());
  std::vector<std::byte> padded(width);
  std::copy(mine.begin(), mine.end(), reinterpret_cast<char*>(padded.data()));
  const std::vector<std::byte> blocks = gather_blocks(transport, padded);

  std::vector<std::string> records(ranks);
  for (std::size_t j = 0; j < ranks; ++j) {
    const std::size_t from = (static_cast<std::size_t>(transport.rank()) + ranks - j) % ranks;
    records[from].assign(reinterpret_cast<const char*>(blocks.data() + j * width), sizes[j]);
  }
  return records;
}

}  // namespace

std::vector<std::string> gather_records(Transport& transport, std::string_view mine) {
  const Transport::Use use(transport, "gather_records");
  try {
    return gather(transport, mine);
  } catch (const std::exception& error) {
    transport.abort(error.what());  // the other ranks would wait for this rank's record
    throw;
  }
}

}  // namespace annulus::ring
