// Answers that were paid for and could not be recorded: one synced local file each, until the store takes them.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "core/operation.hpp"

namespace semel::engine {

/// As it goes into the store: bodies and contents are sealed already.
struct SpoolEntry {
    core::StoredKey key;
    core::Complete complete;
    core::Fingerprint fingerprint;  ///< To acquire anew where the store lost the claim.
    core::Policy policy;
    core::TenantTag tenant;
    /// Bodies of an answer whose chunks could not be written; empty for an inline one.
    std::vector<std::string> chunks;
};

/// Thread-safe. With an empty path entries live in memory only and die with the process (`doctor` says so).
class Spool {
  public:
    /// Reads what an earlier process left. Processes may be given the same folder: the first that runs has it, and takes over what
    /// ended ones left, the others have numbered folders in it. A file that cannot be read is moved aside and named in problems(). Error io: the
    /// folder cannot be made, read or written.
    static base::Result<std::unique_ptr<Spool>> open(std::string path);
    virtual ~Spool() = default;
    Spool() = default;
    Spool(const Spool&) = delete;
    Spool& operator=(const Spool&) = delete;

    /// Durable when it returns (fsync of file and folder), unless in memory. An Error keeps it in memory.
    virtual base::Result<void> put(SpoolEntry entry) = 0;
    /// The entry of the key; of several, the one with the highest token.
    [[nodiscard]] virtual std::optional<SpoolEntry> find(const core::StoredKey& key) = 0;
    /// Whether this very answer is still here: neither delivered nor overtaken.
    [[nodiscard]] virtual bool holds(const core::StoredKey& key, core::FencingToken token) = 0;
    [[nodiscard]] virtual std::vector<core::StoredKey> keys() = 0;
    /// Delivered or overtaken.
    virtual void remove(const core::StoredKey& key, core::FencingToken token) = 0;
    [[nodiscard]] virtual std::size_t size() const = 0;
    /// One sentence per file that open() could not read and moved aside (".broken"), for the log and `doctor`.
    [[nodiscard]] virtual const std::vector<std::string>& problems() const = 0;
};

}  // namespace semel::engine
