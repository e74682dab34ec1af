// The claims of one batch, as statements to send and answers to take in: no I/O of its own, so that
// the first trip can ride with others.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "inbox/inbox.hpp"

namespace semel::inbox {

/// How often a claim looks again at a row that came or went between two statements.
inline constexpr unsigned claim_rounds_max = 4;

class Claims {
  public:
    /// The messages' names must have been checked. `messages` outlive this.
    Claims(const Tables& tables, const InboxOptions& options,
           std::span<const Message* const> messages, ClaimId id);

    /// The statements of the next round trip; none: everything is decided. absorb() their results
    /// before asking again.
    std::vector<sql::Statement> next();
    void absorb(std::span<const sql::ResultRows> results);

    /// One per message.
    [[nodiscard]] std::vector<Claim> result() const;
    /// The rows of messages[i].
    [[nodiscard]] const base::Digest& key(std::size_t i) const { return unique_[index_[i]].key; }

  private:
    enum class Step : std::uint8_t { insert, read, take, finished };
    struct Unique {
        base::Digest key;
        const Message* message = nullptr;
        bool pending = true;
        bool take = false;         ///< There, and may be taken: failed and due, or expired.
        std::int64_t version = 0;  ///< Of the row that may be taken.
        Claim claim;
    };

    sql::Statement insertion() const;
    sql::Statement reading() const;
    sql::Statement taking(const Unique& one) const;
    void take_in_rows(const sql::ResultRows& result);
    Unique* find(const std::optional<std::string>& key);
    [[nodiscard]] bool any(bool Unique::* flag) const;

    const Tables& tables_;
    const InboxOptions& options_;
    /// What this claim writes: the ClaimId, and a part of its own, by which its rows are told from
    /// those of an earlier claim under the same id.
    std::string nonce_;
    std::vector<Unique> unique_;      ///< Sorted by key: everybody locks in one order.
    std::vector<std::size_t> index_;  ///< Of messages[i] in unique_.
    std::vector<bool> repeated_;      ///< messages[i] is not the first of its key.
    Step step_ = Step::insert;
    unsigned rounds_ = 0;
};

/// Removes rows that this transaction has inserted under `id`.
sql::Statement unclaiming(const Tables& tables, std::span<const base::Digest> keys, ClaimId id);
/// Reads key_hash of the rows that are done under `id`.
sql::Statement reading_claimed(const Tables& tables, std::span<const base::Digest> keys,
                               ClaimId id);

}  // namespace semel::inbox
