// The embedded store and the world's faults: killed processes, cut power, torn and damaged files, full disks, wrong clocks.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

#include "integration/store_work.hpp"
#include "stores/rocksdb/rocksdb_store.hpp"
#include "support/manual_clock.hpp"

using namespace semel;
using namespace semel::core;
using namespace semel::integration;
using namespace std::chrono_literals;
namespace fs = std::filesystem;
using base::ErrorCode;
using stores::RocksDbReport;

namespace {

/// A directory of its own, gone with the test.
class Place {
  public:
    Place() {
        std::string name = (fs::temp_directory_path() / "semel-rocksdb-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make a directory like " + name);
        path_ = name;
    }
    ~Place() {
        std::error_code ignored;
        fs::remove_all(path_, ignored);
    }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    fs::path operator/(const char* name) const { return path_ / name; }

  private:
    fs::path path_;
};

/// Files below `path` in which the bytes occur.
std::vector<std::string> files_holding(const fs::path& path, const std::string& bytes) {
    std::vector<std::string> holding;
    for (const auto& entry : fs::recursive_directory_iterator(path)) {
        if (!entry.is_regular_file()) continue;
        std::ifstream in(entry.path(), std::ios::binary);
        const std::string content{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
        if (content.find(bytes) != std::string::npos) holding.push_back(entry.path().filename().string());
    }
    return holding;
}

/// An ext4 image, mounted. Throws (and so fails the test) where the machine does not allow it.
class Disk {
  public:
    Disk(fs::path image, fs::path mounted_at) : image_(std::move(image)), at_(std::move(mounted_at)) {
        fs::create_directories(at_);
        const std::string command = "mount -o loop " + image_.string() + " " + at_.string();
        if (std::system(command.c_str()) != 0) {
            throw std::runtime_error("cannot mount an ext4 image (" + command +
                                     "): this test needs root and loop devices; run it as root on a machine that has them");
        }
    }
    ~Disk() {
        // The image is only left behind: everything in it has been checked.
        if (std::system(("umount " + at_.string()).c_str()) != 0) ::umount2(at_.c_str(), MNT_DETACH);
    }
    Disk(const Disk&) = delete;
    Disk& operator=(const Disk&) = delete;
    [[nodiscard]] const fs::path& at() const { return at_; }

    static fs::path make_image(const fs::path& image, std::uint64_t bytes) {
        std::ofstream(image).close();
        fs::resize_file(image, bytes);
        if (std::system(("mkfs.ext4 -q -F " + image.string() + " >/dev/null 2>&1").c_str()) != 0) {
            throw std::runtime_error("mkfs.ext4 failed: install e2fsprogs");
        }
        return image;
    }

  private:
    fs::path image_, at_;
};

std::unique_ptr<Store> open(const fs::path& path, bool sync = true, RocksDbReport* report = nullptr,
                            base::Clock* clock = nullptr, bool accept_clock = false,
                            stores::RocksDbCounters* counters = nullptr) {
    auto store = stores::open_rocksdb_store(
        {.path = path.string(), .sync = sync, .accept_clock = accept_clock, .clock = clock, .counters = counters}, report);
    if (!store) throw std::runtime_error(store.error().detail);
    return std::move(*store);
}

base::Error refusal(const fs::path& path, bool sync = true) {
    auto store = stores::open_rocksdb_store({.path = path.string(), .sync = sync});
    if (store) {
        ADD_FAILURE() << "the store opened";
        return {};
    }
    return store.error();
}

FencingToken acquire(Store& store, std::uint64_t n, Policy policy = {}) {
    auto result = ask(store, key_of(n), acquire_of(n, policy));
    if (!result) throw std::runtime_error(result.error().detail);
    return std::get<Granted>(result->outcome).token;
}

/// Acquires and completes the intents [first, last), each in a batch of its own.
void work(Store& store, std::uint64_t first, std::uint64_t last, std::size_t bytes = 300, Policy policy = {}) {
    for (std::uint64_t n = first; n < last; ++n) {
        const FencingToken token = acquire(store, n, policy);
        auto result = ask(store, key_of(n), complete_of(n, token, bytes));
        if (!result) throw std::runtime_error(result.error().detail);
    }
}

RecordPtr get(Store& store, std::uint64_t n) {
    auto result = ask(store, key_of(n), Get{});
    if (!result) throw std::runtime_error(result.error().detail);
    return std::get<Found>(result->outcome).record;
}

/// Whether the answer of intent `n` is there, whole.
bool answered(Store& store, std::uint64_t n, std::size_t bytes = 300) {
    const RecordPtr record = get(store, n);
    return record && record->status == Status::completed && *record->answer->body == body_of(n, bytes);
}

/// How many of the intents [0, count) are answered; fails if they are not the first ones.
std::uint64_t answered_prefix(Store& store, std::uint64_t count) {
    std::uint64_t n = 0;
    while (n < count && answered(store, n)) ++n;
    for (std::uint64_t later = n; later < count; ++later) {
        EXPECT_FALSE(answered(store, later)) << "intent " << later << " is there and the earlier " << n << " is not";
    }
    return n;
}

/// What SIGKILL would leave: the files as they are at this moment. The lock's file is not the lock.
void copy_running(const fs::path& from, const fs::path& to) {
    std::error_code error;
    for (int tries = 0; tries < 100; ++tries) {
        fs::remove_all(to);
        fs::copy(from, to, fs::copy_options::recursive, error);
        // The store may remove a file that it no longer needs between the look and the copy.
        if (error != std::errc::no_such_file_or_directory) break;
    }
    ASSERT_FALSE(error) << error.message();
}

fs::path newest_log(const fs::path& directory) {
    fs::path newest;
    for (const auto& entry : fs::directory_iterator(directory)) {
        if (entry.path().extension() == ".log" && entry.path().filename() > newest.filename()) newest = entry.path();
    }
    EXPECT_FALSE(newest.empty());
    return newest;
}

void flip_byte(const fs::path& file, std::uint64_t at) {
    std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekg(static_cast<std::streamoff>(at));
    const char flipped = static_cast<char>(bytes.get() ^ 0x40);
    bytes.seekp(static_cast<std::streamoff>(at));
    bytes.put(flipped);
    ASSERT_TRUE(bytes.good());
}

/// The helper process.
class Torture {
  public:
    Torture(const fs::path& directory, bool sync, std::uint64_t first) {
        int ends[2];
        if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
        pid_ = ::fork();
        if (pid_ == 0) {
            ::dup2(ends[1], 1);
            const std::string from = std::to_string(first), path = directory.string();
            ::execl(SEMEL_TORTURE, "rocksdb_torture", path.c_str(), sync ? "sync" : "async", from.c_str(), "8",
                    static_cast<char*>(nullptr));
            ::_exit(127);
        }
        ::close(ends[1]);
        out_ = ::fdopen(ends[0], "r");
    }
    ~Torture() {
        kill();
        std::fclose(out_);
    }
    Torture(const Torture&) = delete;
    Torture& operator=(const Torture&) = delete;

    std::string line() {
        char text[1024];
        if (std::fgets(text, sizeof text, out_) == nullptr) return {};
        return text;
    }
    /// Reads on until `count` intents are acknowledged.
    void wait_for(std::uint64_t count) {
        while (acknowledged_ < count) {
            if (!take(line())) throw std::runtime_error("the helper ended early");
        }
    }
    void signal(int number) const { ::kill(pid_, number); }
    /// SIGKILL; reads what was acknowledged before.
    std::uint64_t kill() {
        if (pid_ <= 0) return acknowledged_;
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
        pid_ = 0;
        while (take(line())) {
        }
        return acknowledged_;
    }
    [[nodiscard]] std::uint64_t acknowledged() const { return acknowledged_; }

  private:
    bool take(const std::string& text) {
        if (text == "open\n") return true;
        // "done FIRST LAST\n", whole
        const std::size_t space = text.rfind(' ');
        if (!text.starts_with("done ") || space == std::string::npos || !text.ends_with('\n')) return false;
        std::uint64_t last = 0;
        const char* const end = text.data() + text.size() - 1;
        const auto number = std::from_chars(text.data() + space + 1, end, last);
        if (number.ec != std::errc{} || number.ptr != end) return false;
        acknowledged_ = last + 1;
        return true;
    }

    pid_t pid_ = 0;
    FILE* out_ = nullptr;
    std::uint64_t acknowledged_ = 0;
};

// ---------------------------------------------------------------- killed processes

TEST(RocksDbFaults, what_was_acknowledged_survives_sigkill_with_either_durability) {
    for (const bool sync : {true, false}) {
        Place place;
        std::uint64_t next = 0;
        std::vector<std::uint64_t> acknowledged;
        for (std::uint64_t round = 0; round < 4; ++round) {
            Torture torture(place / "data", sync, next);
            torture.wait_for(next + 40 + 13 * round);
            for (const std::uint64_t end = torture.kill(); next < end; ++next) acknowledged.push_back(next);
            RocksDbReport report;
            const auto store = open(place / "data", sync, &report);
            EXPECT_FALSE(report.closed_cleanly);
            EXPECT_FALSE(report.machine_restarted);
            for (const std::uint64_t n : acknowledged) ASSERT_TRUE(answered(*store, n)) << n;
            // What was begun and not acknowledged is left as it is: the next round works behind it.
            while (get(*store, next)) ++next;
        }
    }
}

TEST(RocksDbFaults, after_a_kill_every_lease_is_dead_and_the_next_asker_takes_over) {
    Place place;
    support::ManualClock clock;
    const auto store = open(place / "data", true, nullptr, &clock);
    const FencingToken token = acquire(*store, 1);
    copy_running(place / "data", place / "image");
    RocksDbReport report;
    const auto again = open(place / "image", true, &report, &clock);
    EXPECT_EQ(report.leases_killed, 1U);
    EXPECT_EQ(report.undecided, 1U);
    Acquire op = acquire_of(1);
    op.nonce.bytes[15] = 1;
    auto result = ask(*again, key_of(1), op);
    ASSERT_TRUE(result);
    const auto* granted = std::get_if<Granted>(&result->outcome);
    ASSERT_NE(granted, nullptr);
    EXPECT_EQ(granted->kind, Granted::Kind::takeover);
    EXPECT_TRUE(granted->possible_second_payment);
    EXPECT_GT(granted->token, token);
    // The first owner lives on in its own process and comes too late.
    auto late = ask(*again, key_of(1), complete_of(1, token, 10));
    ASSERT_TRUE(late);
    EXPECT_TRUE(std::holds_alternative<Fenced>(late->outcome));
}

TEST(RocksDbFaults, a_stopped_store_reports_nothing_and_keeps_its_time) {
    Place place;
    support::ManualClock clock;
    StoreTime before;
    {
        const auto store = open(place / "data", true, nullptr, &clock);
        work(*store, 0, 3);
        clock.advance(5s);
        before = store->now();
        store->stop();
    }
    RocksDbReport report;
    const auto store = open(place / "data", true, &report, &clock);
    EXPECT_TRUE(report.closed_cleanly);
    EXPECT_FALSE(report.created);
    EXPECT_TRUE(report.notices.empty());
    EXPECT_EQ(store->now(), before);
    EXPECT_EQ(answered_prefix(*store, 3), 3U);
}

// ---------------------------------------------------------------- clocks

TEST(RocksDbFaults, a_year_forth_or_back_across_a_restart_moves_neither_retention_nor_tokens) {
    for (const auto jump : {std::chrono::hours{24 * 365}, -std::chrono::hours{24 * 365}}) {
        Place place;
        support::ManualClock clock;
        StoreTime last;
        FencingToken token;
        {
            const auto store = open(place / "data", true, nullptr, &clock);
            work(*store, 0, 1);
            token = acquire(*store, 1);
            last = store->now();
            copy_running(place / "data", place / "image");
        }
        clock.jump_wall(jump);
        RocksDbReport report;
        const auto store = open(place / "image", true, &report, &clock);
        EXPECT_TRUE(report.clock_kept);
        ASSERT_FALSE(report.notices.empty());
        EXPECT_GE(store->now(), last);
        EXPECT_LT(store->now() - last, 1min);
        EXPECT_TRUE(answered(*store, 0));
        Acquire op = acquire_of(1);
        op.nonce.bytes[15] = 1;
        auto result = ask(*store, key_of(1), op);
        ASSERT_TRUE(result);
        EXPECT_GT(std::get<Granted>(result->outcome).token, token);
    }
}

TEST(RocksDbFaults, a_year_forth_or_back_while_running_moves_neither_leases_nor_retention) {
    Place place;
    support::ManualClock clock;
    const auto store = open(place / "data", true, nullptr, &clock);
    work(*store, 0, 1);
    acquire(*store, 1);
    const StoreTime before = store->now();
    clock.jump_wall(24h * 365);
    EXPECT_EQ(store->now(), before);
    EXPECT_TRUE(answered(*store, 0));
    Acquire op = acquire_of(1);
    op.nonce.bytes[15] = 1;
    auto result = ask(*store, key_of(1), op);
    ASSERT_TRUE(result);
    EXPECT_TRUE(std::holds_alternative<InFlight>(result->outcome));
    clock.jump_wall(-24h * 730);
    EXPECT_GE(store->now(), before);
    result = ask(*store, key_of(1), op);
    ASSERT_TRUE(result);
    EXPECT_TRUE(std::holds_alternative<InFlight>(result->outcome));
}

TEST(RocksDbFaults, accepting_the_wall_clock_moves_the_store_once) {
    Place place;
    support::ManualClock clock;
    { work(*open(place / "data", true, nullptr, &clock), 0, 1); }
    clock.jump_wall(24h * 365);
    RocksDbReport report;
    {
        const auto store = open(place / "data", true, &report, &clock, true);
        EXPECT_TRUE(report.clock_moved);
        EXPECT_EQ(store->now().us, clock.wall_us());
        EXPECT_EQ(get(*store, 0), nullptr);
    }
    const auto store = open(place / "data", true, &report, &clock);
    EXPECT_FALSE(report.clock_kept);
}

TEST(RocksDbFaults, a_purged_keys_next_token_is_higher_even_after_a_kill_with_the_wall_clock_set_back) {
    for (const bool sync : {true, false}) {
        Place place;
        support::ManualClock clock;
        FencingToken token;
        Policy brief;
        brief.retention_completed = 1s;
        {
            const auto store = open(place / "data", sync, nullptr, &clock);
            // Beyond the time reserved at the opening, and too soon for the idle writing of the clock.
            clock.advance(20s);
            token = acquire(*store, 0, brief);
            ASSERT_TRUE(ask(*store, key_of(0), complete_of(0, token, 10)));
            clock.advance(2s);
            const auto purged = store->purge(10);
            ASSERT_TRUE(purged);
            EXPECT_EQ(*purged, 1U);
            copy_running(place / "data", place / "image");
        }
        clock.jump_wall(-24h * 365);
        const auto store = open(place / "image", sync, nullptr, &clock);
        EXPECT_EQ(get(*store, 0), nullptr);
        EXPECT_GT(acquire(*store, 0), token);
    }
}

// ---------------------------------------------------------------- damaged files

TEST(RocksDbFaults, a_log_that_lost_its_last_bytes_opens_with_everything_before_them) {
    Place place;
    constexpr std::uint64_t count = 6;
    {
        // Not for as long as the test takes: when it is idle it writes its time.
        const auto store = open(place / "data");
        work(*store, 0, count);
        copy_running(place / "data", place / "killed");
    }
    for (const bool sync : {true, false}) {
        for (std::uint64_t cut = 1; cut <= 64; cut += sync ? 1 : 9) {
            fs::remove_all(place / "image");
            copy_running(place / "killed", place / "image");
            const fs::path log = newest_log(place / "image");
            fs::resize_file(log, fs::file_size(log) - cut);
            const auto image = open(place / "image", sync);
            // The last completion was torn; what it completed is in progress with a dead lease.
            ASSERT_EQ(answered_prefix(*image, count), count - 1) << cut;
            const RecordPtr last = get(*image, count - 1);
            ASSERT_TRUE(last);
            EXPECT_EQ(last->status, Status::processing);
        }
    }
}

TEST(RocksDbFaults, a_last_write_with_holes_was_never_acknowledged_and_is_dropped_aloud) {
    Place place;
    constexpr std::uint64_t count = 6;
    const auto store = open(place / "data");
    work(*store, 0, count);
    for (const std::uint64_t hole : {1U, 60U, 300U}) {
        fs::remove_all(place / "image");
        copy_running(place / "data", place / "image");
        const fs::path log = newest_log(place / "image");
        std::fstream bytes(log, std::ios::in | std::ios::out | std::ios::binary);
        bytes.seekp(static_cast<std::streamoff>(fs::file_size(log) - 20 - hole));
        bytes << std::string(hole, '\0') << std::flush;
        RocksDbReport report;
        const auto image = open(place / "image", true, &report);
        EXPECT_EQ(answered_prefix(*image, count), count - 1) << hole;
        EXPECT_GT(report.log_bytes_dropped, 0U);
        EXPECT_FALSE(report.notices.empty());
    }
}

TEST(RocksDbFaults, a_flipped_byte_in_the_middle_of_the_log_is_an_error_that_names_the_file) {
    Place place;
    const auto store = open(place / "data");
    work(*store, 0, 20);
    for (const std::uint64_t percent : {20U, 50U, 80U}) {
        fs::remove_all(place / "image");
        copy_running(place / "data", place / "image");
        const fs::path log = newest_log(place / "image");
        flip_byte(log, fs::file_size(log) * percent / 100);
        const base::Error error = refusal(place / "image");
        EXPECT_EQ(error.code, ErrorCode::store_corrupt);
        EXPECT_NE(error.detail.find(log.filename().string()), std::string::npos) << error.detail;
    }
}

TEST(RocksDbFaults, under_async_a_damaged_log_opens_at_the_last_consistent_point_and_says_so) {
    Place place;
    const auto store = open(place / "data", false);
    work(*store, 0, 20);
    copy_running(place / "data", place / "image");
    const fs::path log = newest_log(place / "image");
    flip_byte(log, fs::file_size(log) / 2);
    RocksDbReport report;
    const auto image = open(place / "image", false, &report);
    const std::uint64_t kept = answered_prefix(*image, 20);
    EXPECT_GT(kept, 4U);
    EXPECT_LT(kept, 16U);
    EXPECT_GT(report.log_bytes_dropped, 0U);
    EXPECT_TRUE(std::any_of(report.notices.begin(), report.notices.end(), [&](const std::string& notice) {
        return notice.find(log.filename().string()) != std::string::npos;
    }));
}

TEST(RocksDbFaults, damage_in_a_table_or_its_list_is_an_error_and_not_silence) {
    Place place;
    {
        const auto store = open(place / "data");
        work(*store, 0, 50);
    }
    { open(place / "data")->stop(); }  // recovery moves the log into tables
    fs::path manifest;
    std::vector<fs::path> tables;
    for (const auto& entry : fs::directory_iterator(place / "data")) {
        if (entry.path().filename().string().starts_with("MANIFEST")) manifest = entry.path();
        if (entry.path().extension() == ".sst" && fs::file_size(entry.path()) > 10'000) tables.push_back(entry.path());
    }
    ASSERT_FALSE(tables.empty());
    copy_running(place / "data", place / "list");
    flip_byte(place / "list" / manifest.filename(), fs::file_size(manifest) / 2);
    EXPECT_EQ(refusal(place / "list").code, ErrorCode::store_corrupt);

    copy_running(place / "data", place / "table");
    for (const fs::path& table : tables) {
        for (std::uint64_t at = 500; at < fs::file_size(table); at += 2000) flip_byte(place / "table" / table.filename(), at);
    }
    auto store = stores::open_rocksdb_store({.path = (place / "table").string()});
    if (!store) {
        EXPECT_EQ(store.error().code, ErrorCode::store_corrupt);
        return;
    }
    std::size_t refused = 0;
    for (std::uint64_t n = 0; n < 50; ++n) {
        const auto result = ask(**store, key_of(n), Get{});
        if (!result) {
            EXPECT_EQ(result.error().code, ErrorCode::store_corrupt);
            ++refused;
        } else {
            const RecordPtr record = std::get<Found>(result->outcome).record;
            ASSERT_TRUE(record) << "a record turned invisible";
            EXPECT_EQ(*record->answer->body, body_of(n, 300));
        }
    }
    EXPECT_GT(refused, 0U);
}

// ---------------------------------------------------------------- directories that are not to be used

TEST(RocksDbFaults, a_directory_that_another_process_holds_is_refused_by_name) {
    Place place;
    Torture torture(place / "data", true, 0);
    ASSERT_EQ(torture.line(), "open\n");
    const base::Error error = refusal(place / "data");
    EXPECT_EQ(error.code, ErrorCode::store_locked);
    EXPECT_NE(error.detail.find((place / "data").string()), std::string::npos);
    EXPECT_NE(error.detail.find("another process holds"), std::string::npos);
}

TEST(RocksDbFaults, a_directory_of_a_newer_version_is_refused_untouched) {
    Place place;
    { work(*open(place / "data"), 0, 1); }
    std::ofstream(place / "data" / "SEMEL_LAYOUT") << stores::rocksdb_layout_version + 1 << "\n";
    const auto before = fs::last_write_time(place / "data");
    const base::Error error = refusal(place / "data");
    EXPECT_EQ(error.code, ErrorCode::store_version);
    EXPECT_NE(error.detail.find("newer version"), std::string::npos);
    EXPECT_EQ(fs::last_write_time(place / "data"), before);
}

TEST(RocksDbFaults, a_foreign_directory_and_an_unreadable_version_are_refused) {
    Place place;
    { work(*open(place / "data"), 0, 1); }
    std::ofstream(place / "data" / "SEMEL_LAYOUT") << "garbage";
    EXPECT_EQ(refusal(place / "data").code, ErrorCode::store_corrupt);
    fs::remove(place / "data" / "SEMEL_LAYOUT");
    const base::Error error = refusal(place / "data");
    EXPECT_EQ(error.code, ErrorCode::store_corrupt);
    EXPECT_NE(error.detail.find("not a Semel store"), std::string::npos);
}

TEST(RocksDbFaults, a_path_that_cannot_be_made_or_written_is_refused_by_name) {
    Place place;
    std::ofstream(place / "file") << "x";
    const base::Error under_file = refusal(place / "file" / "data");
    EXPECT_EQ(under_file.code, ErrorCode::io);
    EXPECT_NE(under_file.detail.find((place / "file").string()), std::string::npos);
    const base::Error under_proc = refusal("/proc/semel-data");
    EXPECT_EQ(under_proc.code, ErrorCode::io);
}

// ---------------------------------------------------------------- full and failing disks

/// Writes zeros until nothing more fits.
void fill_disk(const fs::path& file) {
    const int fd = ::open(file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    ASSERT_GE(fd, 0);
    const std::string zeros(4096, '\0');
    while (::write(fd, zeros.data(), zeros.size()) > 0) {
    }
    ::close(fd);
}

TEST(RocksDbFaults, on_a_full_disk_claims_fail_replays_go_on_and_freed_space_is_used_by_itself) {
    Place place;
    const Disk disk(Disk::make_image(place / "disk.img", 8U << 20), place / "mounted");
    stores::RocksDbCounters counters;
    {
        const auto store = open(disk.at() / "data", true, nullptr, nullptr, false, &counters);
        work(*store, 0, 50);
        const FencingToken held = acquire(*store, 50);
        fill_disk(disk.at() / "filler");

        const auto refused = ask(*store, key_of(51), acquire_of(51));
        ASSERT_FALSE(refused);
        EXPECT_EQ(refused.error().code, ErrorCode::store_full);
        EXPECT_EQ(refused.error().applied, base::Applied::no);
        EXPECT_FALSE(store->health());
        EXPECT_EQ(get(*store, 51), nullptr);
        // What is recorded is answered, and a lease still renews: neither needs the disk.
        EXPECT_EQ(answered_prefix(*store, 50), 50U);
        auto again = ask(*store, key_of(7), acquire_of(7));
        ASSERT_TRUE(again);
        EXPECT_TRUE(std::holds_alternative<Replay>(again->outcome));
        auto renewed = ask(*store, key_of(50), Renew{.token = held, .nonce = acquire_of(50).nonce});
        ASSERT_TRUE(renewed);
        EXPECT_TRUE(std::holds_alternative<core::Applied>(renewed->outcome));
        // The paid answer does not fit; it is refused as a whole and may be brought again.
        const auto unrecorded = ask(*store, key_of(50), complete_of(50, held, 300));
        ASSERT_FALSE(unrecorded);
        EXPECT_EQ(unrecorded.error().code, ErrorCode::store_full);
        EXPECT_EQ(get(*store, 50)->status, Status::processing);

        fs::remove(disk.at() / "filler");
        auto recorded = ask(*store, key_of(50), complete_of(50, held, 300));
        ASSERT_TRUE(recorded) << recorded.error().detail;
        EXPECT_TRUE(std::holds_alternative<core::Applied>(recorded->outcome));
        work(*store, 51, 60);
        EXPECT_TRUE(store->health());
    }
    const auto store = open(disk.at() / "data");
    EXPECT_EQ(answered_prefix(*store, 60), 60U);
}

TEST(RocksDbFaults, a_disk_filled_by_the_store_itself_loses_nothing_acknowledged) {
    Place place;
    const Disk disk(Disk::make_image(place / "disk.img", 8U << 20), place / "mounted");
    constexpr std::size_t bytes = 30'000;
    std::ofstream(disk.at() / "ballast") << body_of(0, 3U << 20);
    const auto store = open(disk.at() / "data");
    std::vector<std::uint64_t> done;
    std::optional<base::Error> refused;
    for (std::uint64_t n = 0; n < 1000 && !refused; ++n) {
        auto granted = ask(*store, key_of(n), acquire_of(n));
        if (!granted) {
            refused = granted.error();
            break;
        }
        auto completed = ask(*store, key_of(n), complete_of(n, std::get<Granted>(granted->outcome).token, bytes));
        if (!completed) {
            refused = completed.error();
            break;
        }
        done.push_back(n);
    }
    ASSERT_TRUE(refused) << "the disk never filled";
    EXPECT_EQ(refused->code, ErrorCode::store_full) << refused->detail;
    ASSERT_GT(done.size(), 20U);
    for (const std::uint64_t n : done) ASSERT_TRUE(answered(*store, n, bytes)) << n;

    fs::remove(disk.at() / "ballast");
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    bool works = false;
    for (std::uint64_t n = 2000; !works && std::chrono::steady_clock::now() < deadline; ++n) {
        works = ask(*store, key_of(n), acquire_of(n)).has_value();
    }
    EXPECT_TRUE(works) << "claims did not work again by themselves";
    for (const std::uint64_t n : done) ASSERT_TRUE(answered(*store, n, bytes)) << n;
}

/// Lets no file grow beyond `bytes`: the write that would fails in the middle, as on a full or failing disk.
class FileLimit {
  public:
    explicit FileLimit(rlim_t bytes) {
        ::signal(SIGXFSZ, SIG_IGN);
        ::getrlimit(RLIMIT_FSIZE, &before_);
        const rlimit limit{bytes, before_.rlim_max};
        ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    ~FileLimit() { ::setrlimit(RLIMIT_FSIZE, &before_); }
    FileLimit(const FileLimit&) = delete;
    FileLimit& operator=(const FileLimit&) = delete;

  private:
    rlimit before_{};
};

TEST(RocksDbFaults, after_a_write_that_failed_in_the_middle_the_store_comes_back_by_itself) {
    for (const bool sync : {true, false}) {
        Place place;
        stores::RocksDbCounters counters;
        {
            const auto store = open(place / "data", sync, nullptr, nullptr, false, &counters);
            work(*store, 0, 40);
            const FencingToken held = acquire(*store, 40);
            {
                const FileLimit limit(2000);
                const auto failed = ask(*store, key_of(41), acquire_of(41));
                ASSERT_FALSE(failed);
                EXPECT_EQ(failed.error().applied, base::Applied::unknown);
                EXPECT_FALSE(store->health());
                // From now on nothing is tried: certainly not applied.
                const auto refused = ask(*store, key_of(42), acquire_of(42));
                ASSERT_FALSE(refused);
                EXPECT_EQ(refused.error().applied, base::Applied::no);
                EXPECT_EQ(answered_prefix(*store, 40), 40U);
                EXPECT_EQ(get(*store, 41), nullptr);
            }
            const auto deadline = std::chrono::steady_clock::now() + 20s;
            while (!ask(*store, key_of(43), acquire_of(43)) && std::chrono::steady_clock::now() < deadline) {
                std::this_thread::yield();
            }
            EXPECT_TRUE(store->health());
            EXPECT_GE(counters.recoveries.load(), 1U);
            // The lease that memory knew goes on: its owner is alive.
            auto renewed = ask(*store, key_of(40), Renew{.token = held, .nonce = acquire_of(40).nonce});
            ASSERT_TRUE(renewed);
            EXPECT_TRUE(std::holds_alternative<core::Applied>(renewed->outcome));
            Acquire other = acquire_of(40);
            other.nonce.bytes[15] = 1;
            auto in_flight = ask(*store, key_of(40), other);
            ASSERT_TRUE(in_flight);
            EXPECT_TRUE(std::holds_alternative<InFlight>(in_flight->outcome));
            ASSERT_TRUE(ask(*store, key_of(40), complete_of(40, held, 300)));
            EXPECT_EQ(answered_prefix(*store, 41), 41U);
        }
        const auto store = open(place / "data", sync);
        EXPECT_EQ(answered_prefix(*store, 41), 41U);
        EXPECT_EQ(get(*store, 42), nullptr);
    }
}

// ---------------------------------------------------------------- cut power

/// Runs the helper on a disk of its own and copies the disk's image in the middle of it, unsynced.
struct PowerCut {
    std::uint64_t acknowledged = 0;

    PowerCut(const Place& place, bool sync) {
        const Disk disk(Disk::make_image(place / "disk.img", 64U << 20), place / "mounted");
        Torture torture(disk.at() / "data", sync, 0);
        torture.wait_for(200);
        // Stopped, so that the copy is one moment; what the disk was not told stays in memory and is lost.
        torture.signal(SIGSTOP);
        acknowledged = torture.acknowledged();
        fs::copy_file(place / "disk.img", place / "cut.img");
        torture.signal(SIGCONT);
    }
};

TEST(RocksDbFaults, under_sync_everything_acknowledged_survives_a_power_cut) {
    Place place;
    const PowerCut cut(place, true);
    const Disk disk(place / "cut.img", place / "after");
    RocksDbReport report;
    const auto store = open(disk.at() / "data", true, &report);
    EXPECT_FALSE(report.closed_cleanly);
    EXPECT_GE(answered_prefix(*store, cut.acknowledged + 8), cut.acknowledged);
}

TEST(RocksDbFaults, under_async_a_power_cut_leaves_a_prefix_and_the_store_says_that_it_may_miss_some) {
    Place place;
    const PowerCut cut(place, false);
    const Disk disk(place / "cut.img", place / "after");
    RocksDbReport report;
    const auto store = open(disk.at() / "data", false, &report);
    EXPECT_FALSE(report.closed_cleanly);
    EXPECT_FALSE(report.notices.empty());
    const std::uint64_t kept = answered_prefix(*store, cut.acknowledged + 8);
    EXPECT_LT(kept, cut.acknowledged) << "the cut lost nothing: this test did not see one";
    work(*store, 10'000, 10'010);
}

// ---------------------------------------------------------------- purging

TEST(RocksDbFaults, purging_does_not_take_the_chunks_from_a_slow_reader) {
    Place place;
    support::ManualClock clock;
    const auto store = open(place / "data", true, nullptr, &clock);
    const FencingToken token = acquire(*store, 0);
    const auto chunk = [](std::uint32_t n) { return body_of(n, 100'000); };
    for (std::uint32_t n = 0; n < 3; ++n) {
        ASSERT_TRUE(ask(*store, key_of(0), PutChunk{.token = token, .n = n, .bytes = chunk(n)}));
    }
    Complete op = complete_of(0, token, 0);
    op.answer.body = nullptr;
    op.answer.body_kind = BodyKind::chunks;
    op.answer.chunk_count = 3;
    op.answer.body_bytes = 300'000;
    ASSERT_TRUE(ask(*store, key_of(0), op));
    const auto read = [&](std::uint32_t n) -> std::optional<std::string> {
        auto result = ask(*store, key_of(0), GetChunk{.token = token, .n = n});
        if (!result) throw std::runtime_error(result.error().detail);
        const auto* found = std::get_if<ChunkFound>(&result->outcome);
        return found != nullptr ? std::optional(found->bytes) : std::nullopt;
    };

    EXPECT_EQ(read(0), chunk(0));
    clock.advance(24h);
    const auto purged = store->purge(100);
    ASSERT_TRUE(purged);
    EXPECT_EQ(*purged, 1U);
    EXPECT_EQ(get(*store, 0), nullptr);
    EXPECT_EQ(read(1), chunk(1));
    clock.advance(59min);
    ASSERT_TRUE(store->purge(100));
    EXPECT_EQ(read(2), chunk(2));
    clock.advance(2min);
    ASSERT_TRUE(store->purge(100));
    EXPECT_EQ(read(0), std::nullopt);
    EXPECT_EQ(read(2), std::nullopt);
}

TEST(RocksDbFaults, an_attempt_made_again_is_not_purged_with_its_former_failure) {
    Place place;
    support::ManualClock clock;
    const auto store = open(place / "data", true, nullptr, &clock);
    const FencingToken token = acquire(*store, 0);
    Fail failure{.token = token, .nonce = acquire_of(0).nonce, .certainty = Certainty::not_processed, .failure = {"x", "x"}};
    ASSERT_TRUE(ask(*store, key_of(0), failure));
    Acquire again = acquire_of(0);
    again.nonce.bytes[15] = 1;
    ASSERT_TRUE(ask(*store, key_of(0), again));
    clock.advance(2h);
    const auto purged = store->purge(100);
    ASSERT_TRUE(purged);
    EXPECT_EQ(*purged, 0U);
    ASSERT_TRUE(get(*store, 0));
    EXPECT_EQ(get(*store, 0)->attempt, 2U);
}

// ---------------------------------------------------------------- what must cost nothing

TEST(RocksDbFaults, renewals_and_replays_write_nothing_and_a_pair_syncs_twice) {
    Place place;
    stores::RocksDbCounters counters;
    const auto store = open(place / "data", true, nullptr, nullptr, false, &counters);
    acquire(*store, 0);
    const std::uint64_t before = counters.syncs;
    work(*store, 1, 2);
    EXPECT_EQ(counters.syncs - before, 2U);
    const std::uint64_t writes = counters.writes, lookups = counters.disk_lookups;
    for (int i = 0; i < 20; ++i) {
        ASSERT_TRUE(ask(*store, key_of(0), Renew{.token = get(*store, 0)->token, .nonce = acquire_of(0).nonce}));
        EXPECT_TRUE(answered(*store, 1));
    }
    EXPECT_EQ(counters.writes, writes);
    EXPECT_EQ(counters.disk_lookups, lookups);
}


// ---- what was replaced is gone

TEST(RocksDbFaults, a_replaced_value_is_in_no_file_any_more_and_everything_else_is) {
    for (const bool sync : {true, false}) {
        const Place place;
        const fs::path path = place / "store";
        const std::string name = "data-key:of a tenant";
        const std::string old = body_of(900, 64);
        const std::string fresh = body_of(901, 64);
        {
            auto store = open(path, sync);
            ask(*store, {}, ClaimValue{.name = name, .value_if_absent = old}).value();
            ask(*store, {}, ClaimValue{.name = "another", .value_if_absent = body_of(902, 64)}).value();
            work(*store, 0, 50);
        }
        auto store = open(path, sync);  // now the old value lies in a table, and in the log below once more
        ASSERT_FALSE(files_holding(path, old).empty());
        ask(*store, {}, ReplaceValue{.name = name, .value = old}).value();
        work(*store, 50, 100);
        const FencingToken running = acquire(*store, 100);
        const auto replaced = ask(*store, {}, ReplaceValue{.name = name, .value = fresh});
        ASSERT_TRUE(replaced) << replaced.error().detail;
        EXPECT_EQ(std::get<Value>(replaced->outcome).value, fresh);
        EXPECT_THAT(files_holding(path, old), testing::IsEmpty());
        EXPECT_FALSE(files_holding(path, fresh).empty());
        EXPECT_FALSE(files_holding(path, body_of(902, 64)).empty());
        EXPECT_TRUE(ask(*store, key_of(100), complete_of(100, running, 300)));

        const fs::path killed = place / "killed";
        copy_running(path, killed);
        EXPECT_THAT(files_holding(killed, old), testing::IsEmpty());
        auto later = open(killed, sync);
        const auto kept = ask(*later, {}, ClaimValue{.name = name, .value_if_absent = "absent"});
        EXPECT_EQ(std::get<Value>(kept->outcome).value, fresh);
        EXPECT_EQ(answered_prefix(*later, 101), 101U);
    }
}

}  // namespace
