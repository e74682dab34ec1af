// Files: "<key in hex>-<token in hex>.answer", written beside and renamed. Layout of a file: magic,
// version, digest of the rest, then the record as the codec writes it, the conversation's turn if
// there is one, and the chunks.
#include "engine/spool.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string_view>

#include "core/record_codec.hpp"

namespace semel::engine {
namespace {

namespace fs = std::filesystem;
using base::Error;
using base::ErrorCode;
using base::Result;
using core::FencingToken;
using core::StoredKey;

constexpr std::string_view magic = "SEMELSP1";
constexpr std::string_view suffix = ".answer";
constexpr std::string_view temporary_suffix = ".tmp";
constexpr std::string_view broken_suffix = ".broken";

// ---------------------------------------------------------------- encoding

void put_u64(std::string& out, std::uint64_t v) {
    for (int shift = 0; shift < 64; shift += 8) out.push_back(static_cast<char>(v >> shift & 0xff));
}
void put_text(std::string& out, std::string_view text) {
    put_u64(out, text.size());
    out.append(text);
}

class Reader {
  public:
    explicit Reader(std::string_view bytes) : rest_(bytes) {}
    std::uint64_t u64() {
        std::uint64_t v = 0;
        const std::string_view raw = take(8);
        for (std::size_t i = raw.size(); i-- > 0;) v = v << 8 | static_cast<unsigned char>(raw[i]);
        return v;
    }
    std::string_view text() { return take(u64()); }
    std::string_view take(std::uint64_t n) {
        if (n > rest_.size()) {
            broken_ = true;
            rest_ = {};
            return {};
        }
        const std::string_view taken = rest_.substr(0, n);
        rest_.remove_prefix(n);
        return taken;
    }
    [[nodiscard]] std::uint64_t left() const { return rest_.size(); }
    [[nodiscard]] bool whole() const { return !broken_ && rest_.empty(); }
    [[nodiscard]] bool broken() const { return broken_; }

  private:
    std::string_view rest_;
    bool broken_ = false;
};

std::string encode(const SpoolEntry& entry) {
    core::Record record;
    record.status = core::Status::completed;
    record.fingerprint = entry.fingerprint;
    record.policy = entry.policy;
    record.tenant = entry.tenant;
    record.token = entry.complete.token;
    record.nonce = entry.complete.nonce;
    record.answer = entry.complete.answer;
    record.usage = entry.complete.usage;
    std::string encoded_record;
    core::encode_record(record, true, encoded_record);

    std::string content(entry.key.view());
    put_text(content, encoded_record);
    const auto& append = entry.complete.append;
    put_u64(content, append ? (append->late ? 2 : 1) : 0);
    if (append) {
        content.append(append->conversation.view());
        put_text(content, append->request_id);
        put_text(content, append->user_content);
        put_text(content, append->answer_content);
    }
    put_u64(content, entry.chunks.size());
    for (const std::string& chunk : entry.chunks) put_text(content, chunk);

    std::string file(magic);
    file.append(base::sha256(content).view());
    file.append(content);
    return file;
}

StoredKey key_from(std::string_view raw) {
    StoredKey key;
    if (raw.size() == key.bytes.size()) std::memcpy(key.bytes.data(), raw.data(), raw.size());
    return key;
}

/// The reason it is not an entry, or the entry.
Result<SpoolEntry> decode(std::string_view file) {
    const auto broken = [](std::string why) {
        return Error{.code = ErrorCode::store_corrupt, .detail = std::move(why)};
    };
    if (file.size() < magic.size() ||
        file.substr(0, magic.size() - 1) != magic.substr(0, magic.size() - 1)) {
        return broken("it is not a spooled answer");
    }
    if (file[magic.size() - 1] != magic.back()) {
        return Error{
            .code = ErrorCode::store_version,
            .detail = "it was written by another version; start that version to deliver it"};
    }
    file.remove_prefix(magic.size());
    if (file.size() < sizeof(base::Digest::bytes)) return broken("it is cut short");
    const std::string_view digest = file.substr(0, sizeof(base::Digest::bytes));
    file.remove_prefix(digest.size());
    if (base::sha256(file).view() != digest) return broken("its checksum does not match");

    Reader in(file);
    SpoolEntry entry;
    entry.key = key_from(in.take(entry.key.bytes.size()));
    const std::string_view encoded_record = in.text();
    if (in.broken()) return broken("it is cut short");
    auto record = core::decode_record(encoded_record);
    if (!record) return record.error();
    if (!record->answer) return broken("it holds no answer");
    entry.fingerprint = std::move(record->fingerprint);
    entry.policy = record->policy;
    entry.tenant = record->tenant;
    entry.complete = {record->token, record->nonce, std::move(*record->answer),
                      std::move(record->usage), std::nullopt};
    if (const std::uint64_t kind = in.u64(); kind != 0) {
        core::Append append;
        append.late = kind == 2;
        append.conversation = key_from(in.take(append.conversation.bytes.size()));
        append.request_id = in.text();
        append.user_content = in.text();
        append.answer_content = in.text();
        entry.complete.append = std::move(append);
    }
    for (std::uint64_t n = in.u64(); n > 0 && !in.broken(); --n)
        entry.chunks.emplace_back(in.text());
    if (!in.whole()) return broken("its parts do not add up to its length");
    return entry;
}

// ---------------------------------------------------------------- files

Error file_error(const std::string& what, const fs::path& path) {
    return {.code = ErrorCode::io,
            .detail = "spool: cannot " + what + " " + path.string() + ": " + std::strerror(errno) +
                      "; check the folder's owner and free space"};
}

Result<void> sync_folder(const fs::path& folder) {
    const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return file_error("open", folder);
    const bool synced = ::fsync(fd) == 0;
    Result<void> result;
    if (!synced) result = file_error("sync", folder);
    ::close(fd);
    return result;
}

Result<void> write_synced(const fs::path& path, std::string_view bytes) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) return file_error("create", path);
    Result<void> result;
    while (!bytes.empty()) {
        const ssize_t n = ::write(fd, bytes.data(), bytes.size());
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            result = file_error("write", path);
            break;
        }
        bytes.remove_prefix(static_cast<std::size_t>(n));
    }
    if (result && ::fsync(fd) != 0) result = file_error("sync", path);
    ::close(fd);
    return result;
}

// ---------------------------------------------------------------- the two kinds

using EntryId = std::pair<StoredKey, FencingToken>;

class MemorySpool : public Spool {
  public:
    Result<void> put(SpoolEntry entry) override {
        keep(std::move(entry));
        return {};
    }
    std::optional<SpoolEntry> find(const StoredKey& key) override {
        if (count_.load(std::memory_order_acquire) == 0) return std::nullopt;
        const std::lock_guard lock(mutex_);
        auto after = entries_.upper_bound({key, FencingToken{UINT64_MAX}});
        if (after == entries_.begin()) return std::nullopt;
        --after;
        if (after->first.first != key) return std::nullopt;
        return after->second;
    }
    bool holds(const StoredKey& key, FencingToken token) override {
        const std::lock_guard lock(mutex_);
        return entries_.contains({key, token});
    }
    std::vector<StoredKey> keys() override {
        const std::lock_guard lock(mutex_);
        std::vector<StoredKey> all;
        for (const auto& [id, entry] : entries_) {
            if (all.empty() || all.back() != id.first) all.push_back(id.first);
        }
        return all;
    }
    void remove(const StoredKey& key, FencingToken token) override {
        const std::lock_guard lock(mutex_);
        entries_.erase({key, token});
        count_.store(entries_.size(), std::memory_order_release);
    }
    [[nodiscard]] std::size_t size() const override {
        return count_.load(std::memory_order_acquire);
    }
    [[nodiscard]] const std::vector<std::string>& problems() const override { return problems_; }

  protected:
    void keep(SpoolEntry entry) {
        const std::lock_guard lock(mutex_);
        const EntryId id{entry.key, entry.complete.token};
        entries_.insert_or_assign(id, std::move(entry));
        count_.store(entries_.size(), std::memory_order_release);
    }
    std::vector<std::string> problems_;  ///< Written before anybody else sees the object.

  private:
    std::mutex mutex_;
    std::map<EntryId, SpoolEntry> entries_;  // guarded by mutex_
    std::atomic<std::size_t> count_{0};      ///< Asked on the way of every acquire.
};

/// A folder that this process has to itself, until it ends or lets go of it.
class FolderLock {
  public:
    FolderLock() = default;
    ~FolderLock() {
        if (fd_ >= 0) ::close(fd_);
    }
    FolderLock(const FolderLock&) = delete;
    FolderLock& operator=(const FolderLock&) = delete;
    /// False: another process has it.
    Result<bool> take(const fs::path& folder) {
        const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0) return file_error("open", folder);
        if (::flock(fd, LOCK_EX | LOCK_NB) == 0) {
            fd_ = fd;
            return true;
        }
        Result<bool> result = false;
        if (errno != EWOULDBLOCK) result = file_error("lock", folder);
        ::close(fd);
        return result;
    }

  private:
    int fd_ = -1;
};

/// Processes that share a folder: the first has the folder itself, the others numbered ones in it.
constexpr int sharing_processes_max = 64;

class FileSpool final : public MemorySpool {
  public:
    explicit FileSpool(fs::path folder) : root_(std::move(folder)) {}

    Result<void> load() {
        if (auto taken = take_folder(); !taken) return taken;
        std::error_code ec;
        // What cannot be written now could not be written when it matters.
        const fs::path probe = folder_ / ("probe" + std::string(temporary_suffix));
        if (auto written = write_synced(probe, "probe"); !written) return written;
        fs::remove(probe, ec);
        std::vector<fs::path> files;
        fs::directory_iterator listing(folder_, ec);
        if (ec) {
            errno = ec.value();
            return file_error("read", folder_);
        }
        for (const auto& file : listing) files.push_back(file.path());
        std::sort(files.begin(), files.end());
        for (const fs::path& path : files) {
            // A process that died before the rename had not promised anything.
            if (path.extension() == temporary_suffix) fs::remove(path, ec);
            if (path.extension() == suffix) load_file(path);
        }
        return sync_folder(folder_);
    }

    Result<void> put(SpoolEntry entry) override {
        const fs::path path = path_of(entry.key, entry.complete.token);
        const fs::path temporary = path.string() + std::string(temporary_suffix);
        const std::string bytes = encode(entry);
        keep(std::move(entry));
        if (auto written = write_synced(temporary, bytes); !written) return written;
        if (::rename(temporary.c_str(), path.c_str()) != 0) return file_error("rename", temporary);
        return sync_folder(folder_);
    }

    void remove(const StoredKey& key, FencingToken token) override {
        MemorySpool::remove(key, token);
        // Not synced: an entry that comes back is delivered again, which changes nothing.
        ::unlink(path_of(key, token).c_str());
    }

  private:
    /// Makes and locks the first folder that no other process has. Who has the whole takes over
    /// what processes that are gone left in theirs.
    Result<void> take_folder() {
        for (int number = 1; number <= sharing_processes_max; ++number) {
            folder_ = number == 1 ? root_ : root_ / std::to_string(number);
            std::error_code ec;
            fs::create_directories(folder_, ec);
            if (ec) {
                errno = ec.value();
                return file_error("make", folder_);
            }
            fs::permissions(folder_, fs::perms::owner_all, ec);
            const auto taken = lock_.take(folder_);
            if (!taken) return taken.error();
            if (!*taken) continue;
            return number == 1 ? adopt() : Result<void>{};
        }
        return Error{.code = ErrorCode::io,
                     .detail = "spool: " + std::to_string(sharing_processes_max) +
                               " processes share " + root_.string() +
                               " already; give this one a folder of its own (spool.path)"};
    }

    Result<void> adopt() {
        for (int number = 2; number <= sharing_processes_max; ++number) {
            const fs::path left = root_ / std::to_string(number);
            std::error_code ec;
            if (!fs::is_directory(left, ec)) continue;
            FolderLock lock;
            const auto taken = lock.take(left);
            if (!taken) return taken.error();
            if (!*taken) continue;
            for (const auto& file : fs::directory_iterator(left, ec)) {
                const fs::path to = root_ / file.path().filename();
                if (::rename(file.path().c_str(), to.c_str()) != 0)
                    return file_error("move", file.path());
            }
            fs::remove(left, ec);
        }
        return {};
    }

    [[nodiscard]] fs::path path_of(const StoredKey& key, FencingToken token) const {
        std::string token_bytes;
        for (int shift = 56; shift >= 0; shift -= 8)
            token_bytes.push_back(static_cast<char>(token.value >> shift & 0xff));
        return folder_ /
               (base::hex(key.view()) + "-" + base::hex(token_bytes) + std::string(suffix));
    }

    void load_file(const fs::path& path) {
        std::ifstream in(path, std::ios::binary);
        std::ostringstream bytes;
        bytes << in.rdbuf();
        auto entry = in ? decode(bytes.view()) : Result<SpoolEntry>(file_error("read", path));
        if (entry && path_of(entry->key, entry->complete.token) != path) {
            entry = Error{.code = ErrorCode::store_corrupt,
                          .detail = "its name belongs to another answer"};
        }
        if (entry) {
            keep(std::move(*entry));
            return;
        }
        const fs::path aside = path.string() + std::string(broken_suffix);
        std::error_code ec;
        fs::rename(path, aside, ec);
        problems_.push_back("spool: " + path.string() +
                            " cannot be delivered: " + entry.error().detail +
                            (ec ? "; it could not be moved aside either: " + ec.message()
                                : "; it was moved to " + aside.string()));
    }

    const fs::path root_;
    fs::path folder_;
    FolderLock lock_;
};

}  // namespace

Result<std::unique_ptr<Spool>> Spool::open(std::string path) {
    if (path.empty()) return std::unique_ptr<Spool>(std::make_unique<MemorySpool>());
    auto spool = std::make_unique<FileSpool>(std::move(path));
    if (auto loaded = spool->load(); !loaded) return loaded.error();
    return std::unique_ptr<Spool>(std::move(spool));
}

}  // namespace semel::engine
