#include "stores/postgres/statements.hpp"

#include <algorithm>
#include <string_view>

#include "base/assert.hpp"
#include "sql_texts.hpp"  // made by CMake

namespace semel::stores::postgres {
namespace {

void replace_all(std::string& text, std::string_view what, std::string_view by) {
    for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size())
        text.replace(at, what.size(), by);
}

/// Without comment lines and the blanks around.
std::string bare(const std::string& text) {
    std::string out;
    for (std::size_t from = 0; from < text.size();) {
        const std::size_t end = std::min(text.find('\n', from), text.size());
        const std::string_view line = std::string_view(text).substr(from, end - from);
        const std::size_t first = line.find_first_not_of(' ');
        if (first != std::string_view::npos && !line.substr(first).starts_with("--")) {
            if (!out.empty()) out += '\n';
            out += line;
        }
        from = end + 1;
    }
    return out;
}

}  // namespace

Statements::Statements(std::string schema) : schema_(std::move(schema)) {
    for (std::size_t i = 0; i < statement_count; ++i)
        all_[i] = {.index = i,
                   .name = "semel_" + std::string(files[i].name),
                   .sql = filled(files[i].text)};
    version_ = {.index = statement_count,
                .name = "",
                .sql = filled("SELECT version FROM @schema@.semel_schema")};
}

std::string Statements::filled(std::string text) const {
    replace_all(text, "@schema@", '"' + schema_ + '"');
    // The transaction's begin: no transaction of this store takes longer than a round trip and a
    // lock's wait.
    replace_all(text, "@now@",
                "coalesce($1::bigint, (extract(epoch FROM now()) * 1000000)::bigint)");
    return bare(text);
}

std::vector<std::string> Statements::migration(int version) const {
    SEMEL_ASSERT(version >= 1 && version <= schema_version, "there is a file for each version");
    std::vector<std::string> out;
    if (version == 1)
        out.push_back(filled("CREATE TABLE @schema@.semel_schema (version integer NOT NULL)"));
    const std::string text = filled(migrations[static_cast<std::size_t>(version - 1)]);
    for (std::size_t from = 0; from < text.size();) {
        const std::size_t end = std::min(text.find(";\n", from), text.size());
        std::string one = text.substr(from, end - from);
        if (one.ends_with(';')) one.pop_back();
        out.push_back(std::move(one));
        from = end + 2;
    }
    out.push_back(filled(version == 1 ? "INSERT INTO @schema@.semel_schema VALUES (1)"
                                      : "UPDATE @schema@.semel_schema SET version = " +
                                            std::to_string(version)));
    return out;
}

}  // namespace semel::stores::postgres
