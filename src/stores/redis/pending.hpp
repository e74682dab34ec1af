// Commands on their way, and the batch that each answers to.
#pragma once

#include <utility>

#include "base/assert.hpp"
#include "stores/redis/wire.hpp"

namespace semel::stores::redis {

/// The answers of one submit(). Ends itself with the last one.
class Batch {
  public:
    Batch(std::size_t size, Client::Done done, SteadyTime deadline)
        : deadline_(deadline), open_(size), answers_(size), done_(std::move(done)) {}
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    /// After its last answer the batch is gone.
    void settle(std::size_t i, Answer answer) {
        answers_[i] = std::move(answer);
        if (--open_ > 0) return;
        done_(std::move(answers_));
        delete this;
    }
    [[nodiscard]] SteadyTime deadline() const { return deadline_; }

  private:
    ~Batch() = default;
    SteadyTime deadline_;
    std::size_t open_;
    std::vector<Answer> answers_;
    Client::Done done_;
};

/// A command that has no answer yet. Whoever holds it answers it or hands it on; it never just
/// disappears.
struct Pending {
    /// Besides the caller's commands, a connection sends its own.
    enum class Role : std::uint8_t { command, asking, time, wait };

    Command command;
    Batch* batch = nullptr;  ///< Null: answered already (too late), or not the caller's.
    std::uint32_t index = 0;
    Role role = Role::command;
    ScriptForm form = ScriptForm::sha1;
    bool asking = false;          ///< Preceded by ASKING.
    bool pinned = false;          ///< For this server, wherever its keys are.
    bool maybe_executed = false;  ///< Sent before on a connection that broke: may not be called
                                  ///< "not executed" any more.
    bool met_replica = false;     ///< Was answered READONLY once.
    std::uint8_t tries = 0;       ///< Refusals and redirections so far.

    Pending() = default;
    Pending(Command what, Batch& whose, std::size_t at)
        : command(std::move(what)), batch(&whose), index(static_cast<std::uint32_t>(at)) {}
    Pending(Pending&& from) noexcept
        : command(std::move(from.command)),
          batch(std::exchange(from.batch, nullptr)),
          index(from.index),
          role(from.role),
          form(from.form),
          asking(from.asking),
          pinned(from.pinned),
          maybe_executed(from.maybe_executed),
          met_replica(from.met_replica),
          tries(from.tries) {}
    Pending& operator=(Pending&& from) noexcept {
        SEMEL_ASSERT(batch == nullptr, "a command is overwritten before it was answered");
        command = std::move(from.command);
        batch = std::exchange(from.batch, nullptr);
        index = from.index;
        role = from.role;
        form = from.form;
        asking = from.asking;
        pinned = from.pinned;
        maybe_executed = from.maybe_executed;
        met_replica = from.met_replica;
        tries = from.tries;
        return *this;
    }
    ~Pending() { SEMEL_ASSERT(batch == nullptr, "a command is dropped before it was answered"); }

    void answer(Answer with) {
        if (batch != nullptr) std::exchange(batch, nullptr)->settle(index, std::move(with));
    }
    /// It was not executed, as far as this attempt goes.
    void refuse(std::string why, bool full = false) {
        answer(NoReply{.applied = maybe_executed ? base::Applied::unknown : base::Applied::no,
                       .full = full && !maybe_executed,
                       .detail = std::move(why)});
    }
    /// It may have been executed.
    void give_up(std::string why) {
        answer(NoReply{.applied = base::Applied::unknown, .detail = std::move(why)});
    }
    [[nodiscard]] bool expired(SteadyTime now) const {
        return batch != nullptr && batch->deadline() <= now;
    }
};

}  // namespace semel::stores::redis
