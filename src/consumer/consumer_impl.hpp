// The inside of a Consumer, in five files: consumer.cpp (its life), partitions.cpp (what comes and
// goes), running.cpp (what runs and what became of it), copying.cpp (what waits at the broker),
// parked.cpp (what waits beside the records).
#pragma once

#include <deque>
#include <future>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "consumer/consumer.hpp"
#include "consumer/control_threads.hpp"
#include "consumer/lanes.hpp"

namespace semel::consumer {

inline constexpr std::size_t alarms_max = 20;
/// Partitions that are claimed side by side.
inline constexpr std::size_t control_threads_max = 8;
inline constexpr milliseconds tick_every{200};
/// Between two tries to claim a partition; doubled from one to the other.
inline constexpr milliseconds claim_again_first{200};
inline constexpr milliseconds claim_again_max{2000};
/// A partition that cannot be claimed for so long is an alarm.
inline constexpr milliseconds claim_alarm_after{10'000};
/// Suspects run alone, one after the other, before anything else goes on; but after so many in a
/// row the others have a turn for a while.
inline constexpr std::size_t suspects_in_a_row = 8;
inline constexpr milliseconds others_turn{1000};
/// A message that is given back unstarted more often than this without a break waits, longer each
/// time, so that a strategy that gives everything back does not keep the loop busy.
inline constexpr std::uint32_t held_free = 3;
inline constexpr milliseconds held_wait{10};
inline constexpr milliseconds held_wait_max{1000};
inline constexpr milliseconds busy_wait_min{10};
/// A fenced message of a partition that the source has not called lost yet is asked about again:
/// dropped while the partition is ours it would never be settled.
inline constexpr milliseconds fenced_wait{1000};
/// stop(): how long a strategy may take beyond stop_drain, and the source to leave the group.
inline constexpr milliseconds stop_margin{2000};
inline constexpr milliseconds leave_within{5000};

/// A partition of this member, from its assign until nothing of it runs any more.
struct HeldPartition {
    enum class Phase {
        claiming,  ///< The group is looked at, the former owner fenced off.
        refused,   ///< Silent.
        begun,
        leaving,  ///< Revoked: what runs may still be settled.
        gone,     ///< Released or lost: receipts are void.
    };
    brokers::AssignmentPtr assignment;
    Phase phase = Phase::claiming;
    std::size_t running = 0;  ///< Messages that the strategy holds.
    std::size_t letters = 0;  ///< Letters and copies that an outlet or the strategy holds.
    std::uint64_t lane = 0;   ///< Of the whole partition; what its keys' lanes are made from.
    std::int64_t told = -1;   ///< The last watermark that the strategy was told.
    bool drained = false;     ///< Said to the source.
    bool paused = false;      ///< Too many messages wait behind failed ones.
    base::SteadyTime claimed_since{};
    base::SteadyTime claim_at = base::SteadyTime::max();  ///< When it is tried again.
    milliseconds claim_wait = claim_again_first;

    // Of its list beside the records.
    core::Nonce fence;
    bool list_lost = false;  ///< Another member took it over: nothing is put there any more.
    std::vector<Message*> to_store;  ///< Wanted there, in the order in which they came.
    std::vector<Message*> storing;   ///< On their way; null: no longer in hand.
    std::size_t in_store = 0;        ///< In hand and stored.
    /// Places of the list that hold a message. Another one at such a place, of a topic that was
    /// made again, is never put there.
    std::unordered_set<std::int64_t> occupied;
    base::SteadyTime store_at{};  ///< Not before: the store refused some.
    /// Messages of the list that the broker delivers again, or has already let go of.
    std::map<std::int64_t, core::ParkedMessage> unread;
    std::int64_t delivered_to = 0;  ///< The source's position a tick ago: all before it has come.

    [[nodiscard]] std::string name() const {
        return assignment->topic() + "-" + std::to_string(assignment->partition().number);
    }
};

/// A dead message whose letter is not finished.
struct LetterOnItsWay {
    enum class Stage {
        stopped,     ///< dead_letter: stop. A person has to say resume.
        due,         ///< To be published when letter_retry has passed.
        publishing,  ///< The outlet has it.
        mark_due,    ///< Confirmed; to be told to the strategy when letter_retry has passed.
        marking,     ///< The strategy has it.
    };
    Message* message = nullptr;
    Dead dead;
    std::int64_t died_ms = 0;
    Stage stage = Stage::due;
};

/// A failed message whose copy is not confirmed.
struct CopyOnItsWay {
    Message* message = nullptr;
    std::size_t delay = 0;    ///< Which of the delays.
    base::SteadyTime due{};   ///< When the message is to run again; if need be, in hand.
    std::int64_t due_ms = 0;  ///< The same as Unix time.
    bool publishing = false;  ///< The outlet has it.
};

class Consumer::Impl : public std::enable_shared_from_this<Consumer::Impl> {
  public:
    Impl(runtime::Loop& loop, ConsumerOptions options, brokers::Source& source, Strategy& strategy,
         deadletter::Outlet* outlet, ConsumerCounters& counters);
    ~Impl();
    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;

    base::Result<void> start(brokers::Listener& listener);
    void stop();
    [[nodiscard]] ConsumerState state() const;

    /// Runs a member function on the loop, unless all is over by then. From any thread.
    template <class Fn>
    void on_loop(Fn fn) {
        loop_.post([self = shared_from_this(), fn = std::move(fn)]() mutable {
            if (!self->over_) fn(*self);
        });
    }

    // On the loop.
    void pause(std::string reason);
    void resume();
    void drain();
    void assigned(std::vector<brokers::AssignmentPtr> which);
    void delivered(std::vector<brokers::Delivery> messages);
    void revoked(const std::vector<brokers::AssignmentPtr>& which);
    void gone(const std::vector<brokers::AssignmentPtr>& which, bool lost);
    void problem(const brokers::Problem& what);

  private:
    // ---- partitions.cpp
    void claim(HeldPartition& partition);
    void group_checked(const std::vector<brokers::AssignmentPtr>& which, GroupFinding finding);
    void claimed(const brokers::AssignmentPtr& assignment, AssignAnswer answer);
    void claim_later(HeldPartition& partition, const std::string& why);
    void begin(HeldPartition& partition, std::optional<std::int64_t> from);
    [[nodiscard]] HeldPartition* find(const brokers::AssignmentPtr& assignment);
    [[nodiscard]] std::uint64_t lane_of(const HeldPartition& partition,
                                        const brokers::Delivery& delivery) const;
    /// `stored`: it lies beside the records.
    void take_in(HeldPartition& partition, brokers::Delivery&& delivery, base::SteadyTime now,
                 bool stored);
    void drop_untaken(HeldPartition& partition);
    void check_left(HeldPartition& partition);
    void tell_watermarks();
    void check_parked();
    void count_partitions();

    // ---- running.cpp
    void wake();
    void turn();
    void flush();
    void arm(base::SteadyTime now);
    void tick();
    [[nodiscard]] bool may_start() const;
    void dispatch(base::SteadyTime now);
    [[nodiscard]] bool run_suspect();
    [[nodiscard]] std::vector<Message*> take_probe(base::SteadyTime at);
    std::vector<Message*> without_unreadable(std::vector<Message*> batch);
    void run(std::vector<Message*> batch, bool alone);
    void answered(Message& message, Verdict verdict);
    void became(Message& message, Applied, bool probe);
    void became(Message& message, Duplicate, bool probe);
    void became(Message& message, const Retry& retry, bool probe);
    void became(Message& message, const Busy& busy, bool probe);
    void became(Message& message, Held, bool probe);
    void became(Message& message, Suspect, bool probe);
    void became(Message& message, const Ill& ill, bool probe);
    void became(Message& message, Fenced, bool probe);
    void became(Message& message, const Dead& dead, bool probe);
    void probed(bool probe, Breaker::Probe how);
    void breaker_opened();
    void breaker_closed();
    void again(Message& message, base::SteadyTime when);
    void settle(Message& message);
    void release(Message& message);
    void forget(Message& message);
    void die(Message& message, const Dead& dead);
    void publish(LetterOnItsWay& letter);
    void published(std::uint64_t which, const base::Result<void>& result);
    void mark(LetterOnItsWay& letter);
    void marked(std::uint64_t which, const base::Result<void>& result);
    void letter_later(std::uint64_t which, LetterOnItsWay& letter, LetterOnItsWay::Stage stage);
    LetterOnItsWay* letter_back(std::uint64_t which);
    void letters_due(base::SteadyTime now);
    void gauges();

    // ---- copying.cpp
    void copy(Message& message, const Retry& retry, std::size_t delay);
    void publish(CopyOnItsWay& copy);
    void copied(std::uint64_t which, const base::Result<void>& result);
    void not_copied(std::uint64_t which, const base::Error& why);
    void copies_due(base::SteadyTime now);

    // ---- parked.cpp
    void open_list(HeldPartition& partition, std::optional<std::int64_t> from);
    void list_opened(HeldPartition& partition, std::optional<std::int64_t> from,
                     base::Result<std::vector<core::ParkedMessage>> found);
    void take_stored(HeldPartition& partition, const core::ParkedMessage& message);
    [[nodiscard]] bool lies_there(HeldPartition& partition, const brokers::Delivery& delivery);
    void take_passed(HeldPartition& partition, std::int64_t position);
    void park(Message& message);
    void park_behind_first(Message& message);
    void not_parked(Message& message);
    void store_parked(base::SteadyTime now);
    void parked(const brokers::AssignmentPtr& assignment, const std::vector<std::int64_t>& places,
                const std::vector<base::Result<Parking::Put>>& results);
    void take_out(const brokers::Partition& partition, std::int64_t place);
    void take_out_finished(base::SteadyTime now);
    void taken_out(const brokers::Partition& partition, const base::Result<void>& result);

    // ---- consumer.cpp
    void begin_stop();
    void stop_strategy();
    void strategy_stopped(bool in_time);
    void check_quiet();
    void leave(std::string why);
    void end();
    void show();
    void alarm(std::string about, std::string text);
    void no_alarm(std::string_view about);
    [[nodiscard]] base::SteadyTime now() const { return loop_.now(); }

    runtime::Loop& loop_;
    const ConsumerOptions options_;
    brokers::Source& source_;
    Strategy& strategy_;
    deadletter::Outlet* const outlet_;
    ConsumerCounters& counters_;
    const Identity identity_;
    const std::string source_name_;
    const std::string promise_;
    const bool commits_positions_;
    Strategy::Answer answer_;
    ControlThreads control_{control_threads_max};

    // ---- on the loop
    Lanes lanes_;
    Breaker breaker_;
    std::unordered_map<const brokers::Assignment*, std::unique_ptr<HeldPartition>> partitions_;
    std::uint64_t partitions_ever_ = 0;
    std::unordered_map<std::uint64_t, Unreadable> unreadable_;   ///< By InHand::arrival.
    std::unordered_map<std::uint64_t, LetterOnItsWay> letters_;  ///< By InHand::arrival.
    std::deque<std::pair<base::SteadyTime, std::uint64_t>> letters_due_;
    std::size_t letters_out_ = 0;                             ///< And copies.
    std::unordered_map<std::uint64_t, CopyOnItsWay> copies_;  ///< By InHand::arrival.
    std::deque<std::pair<base::SteadyTime, std::uint64_t>> copies_due_;
    std::size_t in_store_ = 0;  ///< In hand and beside the records, of all partitions.
    /// Finished and still beside the records.
    struct TakeOut {
        std::vector<std::int64_t> places;
        std::vector<std::int64_t> out;  ///< The store has been told.
        base::SteadyTime again{};
    };
    std::map<brokers::Partition, TakeOut> finished_;
    std::deque<Message*> suspects_;
    std::size_t suspects_run_ = 0;
    base::SteadyTime suspects_at_ = base::SteadyTime::min();
    Message* alone_ = nullptr;
    /// Would be dead letters, had the breaker not opened over them: each is the probe when nothing
    /// else can be, in turns; all run again when it has closed.
    std::deque<Message*> spared_;
    Message* probe_ = nullptr;
    std::vector<brokers::Receipt> settled_;
    bool turn_posted_ = false;
    runtime::TimerId timer_ = 0, tick_ = 0, stop_timer_ = 0;
    base::SteadyTime timer_at_ = base::SteadyTime::max();
    bool paused_ = false, draining_ = false, leaving_ = false, left_ = false;
    std::string pause_reason_, refused_, fatal_, left_why_;
    bool stopping_ = false, strategy_stopping_ = false, quiet_ = false;
    base::SteadyTime stop_by_{};
    bool over_ = false;

    // ---- any thread
    std::promise<void> quiet_promise_;
    std::once_flag stop_once_;
    std::atomic<bool> started_{false}, stopped_{false};
    mutable std::mutex shown_mutex_;
    std::string shown_condition_ = "stopped", shown_reason_ = "not started";
    std::deque<std::pair<std::string, std::string>> alarms_;  ///< What about, and the sentence.
};

}  // namespace semel::consumer
