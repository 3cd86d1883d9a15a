#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

namespace annulus {

struct Color {
  double red, green, blue;  // 0..1
};

[[nodiscard]] inline std::string hex(const Color& c) {
  const auto byte = [](double v) { return static_cast<int>(std::lround(255.0 * v)); };
  return fmt::format("#{:02x}{:02x}{:02x}", byte(c.red), byte(c.green), byte(c.blue));
}

[[nodiscard]] inline Color mix(const Color& a, const Color& b, double t) {
  return {a.red + t * (b.red - a.red), a.green + t * (b.green - a.green),
          a.blue + t * (b.blue - a.blue)};
}

[[nodiscard]] inline std::string escape(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '&') {
      result += "&amp;";
    } else if (c == '<') {
      result += "&lt;";
    } else if (c == '>') {
      result += "&gt;";
    } else {
      result += c;
    }
  }
  return result;
}

class Canvas {
 public:
  void rect(double x, double y, double w, double h, const std::string& fill,
            const std::string& more = "") {
    body_ += fmt::format(
        "<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\"{}{}/>\n", x,
        y, w, h, fill, more.empty() ? "" : " ", more);
  }
  // anchor: start, middle or end. The baseline is y.
  void text(double x, double y, double size, const std::string& words, const char* anchor = "start",
            const std::string& fill = "#1f2933", const std::string& more = "") {
    body_ += fmt::format(
        "<text x=\"{:.2f}\" y=\"{:.2f}\" font-size=\"{:.1f}\" text-anchor=\"{}\" "
        "fill=\"{}\"{}{}>{}</text>\n",
        x, y, size, anchor, fill, more.empty() ? "" : " ", more, escape(words));
  }
  void line(double x1, double y1, double x2, double y2, const std::string& stroke, double width) {
    body_ += fmt::format(
        "<line x1=\"{:.2f}\" y1=\"{:.2f}\" x2=\"{:.2f}\" y2=\"{:.2f}\" stroke=\"{}\" "
        "stroke-width=\"{:.2f}\"/>\n",
        x1, y1, x2, y2, stroke, width);
  }
  // Leaves and arrives horizontally; the head ends at (x2, y2).
  void arrow(double x1, double y1, double x2, double y2, const std::string& color, double width,
             double head) {
    const double end = x2 - head;
    const double bend = 0.45 * (end - x1);
    body_ += fmt::format(
        "<path d=\"M{:.1f} {:.1f}C{:.1f} {:.1f} {:.1f} {:.1f} {:.1f} {:.1f}\" fill=\"none\" "
        "stroke=\"{}\" "
        "stroke-width=\"{:.2f}\" stroke-opacity=\"0.8\"/>\n",
        x1, y1, x1 + bend, y1, end - bend, y2, end, y2, color, width);
    if (head <= 0.0) return;
    const double half = std::max(0.45 * head, 0.5 * width + 1.2);
    body_ += fmt::format("<path d=\"M{:.1f} {:.1f}V{:.1f}L{:.1f} {:.1f}z\" fill=\"{}\"/>\n", end,
                         y2 - half, y2 + half, x2, y2, color);
  }
  [[nodiscard]] std::string finish(double width, double height) const {
    return fmt::format(
               "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
               "viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"Inter, 'Helvetica Neue', Helvetica, "
               "Arial, "
               "'DejaVu Sans', sans-serif\">\n<rect width=\"100%\" height=\"100%\" "
               "fill=\"#ffffff\"/>\n",
               width, height) +
           body_ + "</svg>\n";
  }

 private:
  std::string body_;
};

}  // namespace annulus
