// Record <-> bytes. Versioned; the format is docs/internals/record-format.md.
#pragma once

#include <string>
#include <string_view>

#include "base/result.hpp"
#include "core/operation.hpp"
#include "core/record.hpp"

namespace semel::core {

inline constexpr std::uint8_t record_format_version = 1;

/// Appends the encoding to `out`. With `with_body` an inline body is part of it; without, the record says that its body
/// lies elsewhere and the store brings it back (`decode_record`'s caller sets answer->body).
/// Only fields that are set are written: a bare message record takes at most 100 bytes.
void encode_record(const Record& record, bool with_body, std::string& out);

/// Error store_corrupt: not an encoding of this version (its detail says at which byte); store_version: a newer one.
base::Result<Record> decode_record(std::string_view bytes);

// ---- parts of a record, for stores that keep them side by side; the same bytes as within a record

void encode_part(const Owner& owner, std::string& out);
void encode_part(const Failure& failure, std::string& out);
void encode_part(const Usage& usage, std::string& out);
void encode_part(const Append& turn, std::string& out);  ///< Without answer_content and late.
void encode_part(const Answer& answer, std::string& out);
void encode_part(const std::vector<FieldMark>& fields, std::string& out);
/// Error store_corrupt: not the encoding of such a part.
base::Result<void> decode_part(std::string_view bytes, Owner& owner);
base::Result<void> decode_part(std::string_view bytes, Failure& failure);
base::Result<void> decode_part(std::string_view bytes, Usage& usage);
base::Result<void> decode_part(std::string_view bytes, Append& turn);
base::Result<void> decode_part(std::string_view bytes, Answer& answer);
base::Result<void> decode_part(std::string_view bytes, std::vector<FieldMark>& fields);

}  // namespace semel::core
