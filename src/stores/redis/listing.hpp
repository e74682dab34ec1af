// Listings and clean-up: what goes over many keys, apart from the hot path. All functions block.
#pragma once

#include <functional>
#include <mutex>
#include <string>

#include "core/store.hpp"
#include "stores/redis/client.hpp"
#include "stores/redis/layout.hpp"

namespace semel::stores::redis {

class Listing {
  public:
    /// `time` as in RedisOptions. `client` and `names` must outlive this.
    Listing(Client& client, const Names& names, std::function<core::StoreTime()> time);

    /// core::Store::scan. Undecided records are found by their buckets' sets, all others by SCAN of
    /// every master.
    base::Result<core::ScanPage> scan(const core::ScanFilter& filter, const std::string& cursor,
                                      std::size_t limit);
    /// core::Store::purge. The server expires what is decided by itself; this removes what it could
    /// not: records of another clock, chunks that no record speaks for. Looks at a bounded number
    /// of keys and goes on there the next time.
    base::Result<std::size_t> purge(std::size_t limit);

  private:
    struct Page;
    struct Position {
        std::size_t master = 0;
        std::string cursor = "0";
    };
    base::Result<void> scan_undecided(Page& page, const std::string& cursor);
    base::Result<void> scan_all(Page& page, const std::string& cursor);
    base::Result<bool> take(Page& page, const std::vector<std::string>& names_found,
                            const std::function<std::string(std::size_t)>& cursor_at);
    base::Result<std::vector<Reply>> call(std::vector<Command> commands);
    [[nodiscard]] Command purge_of(const std::string& name, const Names::Parsed& parsed) const;
    base::Result<core::StoreTime> time_of(std::uint16_t slot);
    [[nodiscard]] std::string time_text() const;

    Client& client_;
    const Names& names_;
    const std::function<core::StoreTime()> time_;
    std::mutex purge_mutex_;
    Position purge_at_;  ///< Guarded by purge_mutex_.
};

}  // namespace semel::stores::redis
