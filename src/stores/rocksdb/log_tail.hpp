// Tells a torn end of RocksDB's write-ahead log from damage in its middle.
#pragma once

#include <cstddef>
#include <string_view>

namespace semel::stores {

/// A write that power cut short is no longer than a write batch with its largest record.
inline constexpr std::size_t torn_write_max_bytes = 8U << 20;

/// Whether the first unreadable record of a log belongs to the last write in it: then that write was never synced to its end, so
/// nobody was told of it (or the disk damaged exactly the last write, which looks the same). A later write behind it proves that
/// it was synced: damage. `log`: the whole file. False also if every record can be read.
bool only_last_write_is_torn(std::string_view log);

}  // namespace semel::stores
