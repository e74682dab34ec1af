// Deadlines: the time-outs of many connections behind one timer of their loop. Setting one costs
// two stores.
#pragma once

#include <memory>

#include "runtime/loop.hpp"

namespace semel::http {

class Deadlines;

/// A deadline of one connection; part of that connection. Unlinks itself.
class Deadline {
  public:
    explicit Deadline(std::shared_ptr<Deadlines> list);
    Deadline(const Deadline&) = delete;
    Deadline& operator=(const Deadline&) = delete;
    virtual ~Deadline();

    void set(std::chrono::milliseconds from_now);
    void clear() { at_ = base::SteadyTime::max(); }
    [[nodiscard]] bool is_set() const { return at_ != base::SteadyTime::max(); }

  protected:
    /// The deadline passed; it is cleared already. May destroy this object and others of the list,
    /// and set deadlines.
    virtual void expired() = 0;

  private:
    friend class Deadlines;
    std::shared_ptr<Deadlines> list_;
    Deadline* next_ = nullptr;
    Deadline* previous_ = nullptr;
    base::SteadyTime at_ = base::SteadyTime::max();
};

/// For one loop, on its thread. The timer is armed for the earliest deadline seen and looks through
/// all when it fires; a deadline that is moved later or cleared leaves it as it is. So deadlines
/// that never pass cost no timer operations.
class Deadlines : public std::enable_shared_from_this<Deadlines> {
  public:
    /// The list is not looked through more often than this, however many connections time out one
    /// after the other.
    static constexpr std::chrono::milliseconds kGranularity{5};

    explicit Deadlines(runtime::Loop& loop) : loop_(loop) {}

    [[nodiscard]] runtime::Loop& loop() { return loop_; }
    [[nodiscard]] bool empty() const { return first_ == nullptr; }

  private:
    friend class Deadline;
    void note(base::SteadyTime at);
    void fire();

    runtime::Loop& loop_;
    Deadline* first_ = nullptr;
    Deadline* cursor_ =
        nullptr;  // the next one to look at while fire() runs: an expiry may destroy others
    base::SteadyTime armed_for_ = base::SteadyTime::max();
    runtime::TimerId timer_ = 0;
};

}  // namespace semel::http
