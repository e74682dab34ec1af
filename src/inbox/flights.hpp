// Flights: which messages run in this process's own code (callbacks), so that whoever comes after
// its death finds the one that killed it. Kept in semel_flights and semel_crashes, never in the
// transaction of an effect.
//
// A connection names what it is about to run in one row of its own, which the next naming replaces.
// What a dead process has left named is counted, message by message, in semel_crashes: a death
// beside others, or a death alone. A message that ends leaves both.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "inbox/inbox.hpp"

namespace semel::inbox {

/// Deaths of processes since the message last ended.
struct Deaths {
    std::uint32_t beside_others = 0;
    std::uint32_t alone = 0;
};
using DeathsOf = std::unordered_map<base::Digest, Deaths, base::DigestHash>;

/// Thread-safe: holds nothing but what never changes. Executors must not be inside a transaction.
class Flights {
  public:
    /// `options` as those of the inbox. Each object is another process to the tables.
    explicit Flights(InboxOptions options);

    /// A partition was taken over by TransactionalInbox::assign, which gave `fence`: what its
    /// former owners have left named died with them. Answers what is counted against its messages.
    Tried<DeathsOf> take_over(Executor& executor, const Fence& fence) const;
    /// The same without partitions: of these messages, which the broker has delivered before. What
    /// another process has named of them died with it, as the broker gives a message to one at a
    /// time.
    Tried<DeathsOf> take_over(Executor& executor, std::span<const base::Digest> messages) const;

    /// Names what this connection (a number of the caller's) runs from now on, in place of what it
    /// named before. Durable when it answers. One round trip.
    Tried<sql::Done> begin(Executor& executor, unsigned connection,
                           const std::optional<Fence>& fence,
                           std::span<const base::Digest> messages, bool alone) const;
    /// Nothing that this connection has named runs any more; and these messages, of which deaths
    /// are counted, have ended. Not needed where everything named is done: done ids are not
    /// counted.
    Tried<sql::Done> end(Executor& executor, unsigned connection,
                         std::span<const base::Digest> ended) const;
    /// Nothing of this process runs any more. Also forgets what is older than the inbox's
    /// retention.
    Tried<sql::Done> leave(Executor& executor) const;

  private:
    InboxOptions options_;
    std::string process_;
};

}  // namespace semel::inbox
