// RecordingListener: keeps what a source tells, for tests to look at from their own thread.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "brokers/source.hpp"
#include "support/server_process.hpp"

namespace semel::support {

/// A delivery with bytes of its own.
struct Got {
    brokers::Receipt receipt;
    std::optional<std::string> key, value;
    std::vector<std::pair<std::string, std::optional<std::string>>> headers;
    std::optional<std::int64_t> timestamp_ms;
    bool redelivered = false;
    brokers::AmqpProperties properties;
    [[nodiscard]] std::int32_t partition() const { return receipt.assignment->partition().number; }
    [[nodiscard]] std::int64_t offset() const { return receipt.position; }
};

class RecordingListener : public brokers::Listener {
  public:
    /// `begin`: begins every assignment at once. `settle`: settles every message at once. `drain`:
    /// says at once that revoked ones are drained.
    struct Manners {
        bool begin = true;
        bool settle = false;
        bool drain = true;
    };
    explicit RecordingListener(brokers::Source& source) : RecordingListener(source, {}) {}
    RecordingListener(brokers::Source& source, Manners manners)
        : source_(source), manners_(manners) {}
    /// The source goes first: it may tell something until it has stopped.
    ~RecordingListener() override { source_.stop(std::chrono::milliseconds{0}); }

    void assigned(const std::vector<brokers::AssignmentPtr>& which) override {
        note("assigned", which);
        if (manners_.begin) {
            for (const brokers::AssignmentPtr& one : which) source_.begin(one);
        }
    }
    void delivered(std::vector<brokers::Delivery> messages) override {
        std::vector<brokers::Receipt> receipts;
        {
            const std::lock_guard lock(mutex_);
            for (const brokers::Delivery& message : messages) {
                Got& got = got_.emplace_back();
                got.receipt = message.receipt;
                got.key = message.key;
                got.value = message.value;
                for (const brokers::Header& header : message.headers)
                    got.headers.emplace_back(header.name, header.value);
                got.timestamp_ms = message.timestamp_ms;
                got.redelivered = message.redelivered;
                if (message.properties) got.properties = *message.properties;
                receipts.push_back(message.receipt);
            }
        }
        if (manners_.settle) source_.settle(receipts);
    }
    void revoked(const std::vector<brokers::AssignmentPtr>& which, base::SteadyTime) override {
        note("revoked", which);
        if (manners_.drain) {
            for (const brokers::AssignmentPtr& one : which) source_.drained(one);
        }
    }
    void released(const std::vector<brokers::AssignmentPtr>& which) override {
        note("released", which);
    }
    void lost(const std::vector<brokers::AssignmentPtr>& which) override { note("lost", which); }
    void problem(const brokers::Problem& what) override {
        const std::lock_guard lock(mutex_);
        problems_.push_back(what);
    }

    [[nodiscard]] std::vector<Got> got() const {
        const std::lock_guard lock(mutex_);
        return got_;
    }
    [[nodiscard]] std::size_t count() const {
        const std::lock_guard lock(mutex_);
        return got_.size();
    }
    /// Values in the order of arrival ("<null>" for a tombstone).
    [[nodiscard]] std::vector<std::string> values() const {
        std::vector<std::string> out;
        for (const Got& one : got()) out.push_back(one.value.value_or("<null>"));
        return out;
    }
    [[nodiscard]] std::vector<std::int64_t> offsets(std::int32_t partition = 0) const {
        std::vector<std::int64_t> out;
        for (const Got& one : got()) {
            if (one.partition() == partition) out.push_back(one.offset());
        }
        return out;
    }
    /// The last delivery with this value.
    [[nodiscard]] Got find(const std::string& value) const {
        const std::vector<Got> all = got();
        const auto at = std::find_if(all.rbegin(), all.rend(),
                                     [&](const Got& one) { return one.value == value; });
        EXPECT_NE(at, all.rend()) << value << " was not delivered";
        return at == all.rend() ? Got{} : *at;
    }
    /// Assignments that were told with this event ("assigned", "revoked", "released", "lost").
    [[nodiscard]] std::vector<brokers::AssignmentPtr> told(const std::string& event) const {
        const std::lock_guard lock(mutex_);
        const auto at = events_.find(event);
        return at == events_.end() ? std::vector<brokers::AssignmentPtr>{} : at->second;
    }
    /// The text of the first problem of this kind; empty if there is none.
    [[nodiscard]] std::string problem_of(brokers::ProblemKind kind) const {
        const std::lock_guard lock(mutex_);
        for (const brokers::Problem& one : problems_) {
            if (one.kind == kind) return one.text;
        }
        return {};
    }
    [[nodiscard]] std::string all_problems() const {
        const std::lock_guard lock(mutex_);
        std::string out;
        for (const brokers::Problem& one : problems_) out += one.text + "\n";
        return out;
    }
    bool wait_count(std::size_t n,
                    std::chrono::milliseconds within = std::chrono::seconds{15}) const {
        return ServerProcess::eventually([&] { return count() >= n; }, within);
    }
    bool wait_told(const std::string& event, std::size_t n,
                   std::chrono::milliseconds within = std::chrono::seconds{15}) const {
        return ServerProcess::eventually([&] { return told(event).size() >= n; }, within);
    }
    bool wait_problem(brokers::ProblemKind kind,
                      std::chrono::milliseconds within = std::chrono::seconds{15}) const {
        return ServerProcess::eventually([&] { return !problem_of(kind).empty(); }, within);
    }

  private:
    void note(const std::string& event, const std::vector<brokers::AssignmentPtr>& which) {
        const std::lock_guard lock(mutex_);
        std::vector<brokers::AssignmentPtr>& all = events_[event];
        all.insert(all.end(), which.begin(), which.end());
    }

    brokers::Source& source_;
    const Manners manners_;
    mutable std::mutex mutex_;
    std::vector<Got> got_;
    std::map<std::string, std::vector<brokers::AssignmentPtr>> events_;
    std::vector<brokers::Problem> problems_;
};

}  // namespace semel::support
