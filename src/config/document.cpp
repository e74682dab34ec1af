#include "config/document.hpp"

#include <limits>
#include <numeric>
#include <sstream>

namespace semel::config {

std::string quoted(std::string_view text) {
    constexpr std::size_t shown_max = 80;
    std::string out("'");
    for (const char c : text.substr(0, shown_max))
        out += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
    return out + (text.size() > shown_max ? "…'" : "'");
}

namespace {

std::size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<std::size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), std::size_t{0});
    for (std::size_t i = 0; i < a.size(); ++i) {
        std::size_t diagonal = std::exchange(row[0], i + 1);
        for (std::size_t j = 0; j < b.size(); ++j) {
            const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
            diagonal = row[j + 1];
            row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
        }
    }
    return row.back();
}

}  // namespace

std::string advice(std::string_view word, const std::vector<std::string_view>& known) {
    constexpr std::size_t word_max = 64;  // bounds the work on hostile input
    if (known.empty()) return "";
    std::string_view closest = known.front();
    std::size_t least = std::numeric_limits<std::size_t>::max();
    for (const std::string_view candidate : known) {
        const std::size_t distance = edit_distance(word.substr(0, word_max), candidate);
        if (distance < least) {
            least = distance;
            closest = candidate;
        }
    }
    if (least <= std::max<std::size_t>(2, closest.size() / 3))
        return "; did you mean " + quoted(closest) + "?";
    return "; known here: " + joined(known);
}

void Map::read_number(std::string_view key, double& into, double min, double max) const {
    const YAML::Node* at = find(key);
    if (at == nullptr) return;
    const std::string text = document_.text(*at, path(key));
    double value = 0;
    const auto [after, error] =
        std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
    const bool whole = error == std::errc() && after == text.data() + text.size();
    if (text.empty() || !whole || !(value >= min && value <= max)) {
        std::ostringstream range;
        range << min << " to " << max;
        refuse(key, ": " + quoted(text) + " is not a number from " + range.str());
    }
    into = value;
}

std::vector<YAML::Node> Map::items(std::string_view key, bool single_allowed) const {
    const YAML::Node* node = find(key);
    if (node == nullptr) return {};
    if (single_allowed && node->IsScalar()) return {*node};
    if (!node->IsSequence()) refuse(key, " must be a list");
    std::vector<YAML::Node> out;
    for (const auto& item : *node) out.push_back(item);
    return out;
}

}  // namespace semel::config
