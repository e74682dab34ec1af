// Verdict: what became of one run of a message, as its strategy tells the consumer.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "core/record.hpp"

namespace semel::consumer {

using std::chrono::milliseconds;

/// Its effect happened in this run and is durable: settle.
struct Applied {};
/// Its effect had happened before, and is durable: settle.
struct Duplicate {};
/// It failed, the failure is durable, and it is due again after `delay`. Its lane waits for it.
struct Retry {
    milliseconds delay{0};
    std::string reason;   ///< For people; no payload.
    bool charged = true;  ///< It counts as a failure of this message (metrics); false: not yet, no
                          ///< attempt was used up.
    /// Which of retry.delays this wait is, from 0. Empty: a wait between runs in place, or what is
    /// left of an earlier wait.
    std::optional<std::size_t> step{};
};
/// Another owner works on it (or this process did, before it died): ask again after `remaining`.
/// Nothing is charged.
struct Busy {
    milliseconds remaining{0};
};
/// Not run, because one before it in its lane did not end applied or duplicate, or because the
/// strategy gave it back unstarted. Run it again as soon as its lane allows.
struct Held {};
/// Its last owners died while they ran it among others: run it alone (Strategy::run with alone),
/// nothing else beside it.
struct Suspect {
    std::uint32_t lone_deaths =
        0;  ///< Of those, deaths while it ran alone: who has fewest runs first.
};
/// It cannot be run now, through no fault of its own: the store, the database or the handler is
/// ill. Nothing is charged. The consumer pauses, and probes with one message after a back-off.
struct Ill {
    std::string reason;  ///< What is ill and what to do.
};
/// The partition has another owner: drop it, never settle.
struct Fenced {};

/// Why a message is given up. The names (name_of) are labels and letter classes.
enum class DeadClass : std::uint8_t {
    attempts,  ///< Its attempts are used up.
    crashes,   ///< It ran alone when its process died, too often.
    fatal,     ///< The handler said that another try cannot end otherwise.
    mismatch,  ///< Its id names another message.
    conflict,  ///< State machine: the target is reached with other values, or another end.
    unknown,   ///< on_unknown: hold.
    decode,    ///< Its payload cannot be read.
    missing_id,
    tombstone,
};
[[nodiscard]] const char* name_of(DeadClass which);

/// Given up; where there is a record it says so already. A letter is to be published, then
/// Strategy::letter_published, then settle.
struct Dead {
    DeadClass why = DeadClass::attempts;
    std::string reason;
    std::uint32_t failed_runs = 0;
    std::int64_t first_failure_ms = 0;  ///< Unix time; 0: not known.
    std::uint32_t generation = 1;
    core::FencingToken token;   ///< Of the record; 0: there is none.
    bool letter_known = false;  ///< Its letter is known to be published: settle.
};

using Verdict = std::variant<Applied, Duplicate, Retry, Busy, Held, Suspect, Ill, Fenced, Dead>;

}  // namespace semel::consumer
