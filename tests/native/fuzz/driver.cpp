// What libFuzzer does, in its simplest form, for machines without clang: mutate inputs, keep those that reach new code
// (gcc's trace-pc tells), run within a time and memory bound, and leave the input of a failure in a file.
//
//     fuzz_NAME [--seconds N] [--runs N] [--seed N] [--save DIR] [FILE...]      files: run these inputs and nothing else
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "fuzz.h"

namespace {
constexpr unsigned kHangSeconds = 10;
constexpr long kMoreMegabytes = 256;  // than at the start: no input may make us keep that much
constexpr size_t kLargest = 4096;
constexpr size_t kMap = 1 << 16;

std::array<unsigned char, kMap> seen;
bool new_code = false;
std::string current;
std::string save_to = ".";

void save() {
  const std::string path = save_to + "/failed-" + std::to_string(std::hash<std::string>()(current));
  std::ofstream(path) << current;
  std::fprintf(stderr, "fuzz: the input is in %s; run it again by naming it\n", path.c_str());
}

// Not safe in a signal handler by the letter; the process ends anyway, and the input is what matters.
void on_signal(int number) {
  std::fprintf(stderr, number == SIGALRM ? "fuzz: an input took more than %u s\n" : "fuzz: ended\n", kHangSeconds);
  save();
  std::signal(SIGABRT, SIG_DFL);
  std::abort();
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : dice_(seed) {}
  size_t below(size_t n) { return n == 0 ? 0 : std::uniform_int_distribution<size_t>(0, n - 1)(dice_); }

  std::string mutate(const std::vector<std::string>& corpus) {
    std::string s = corpus[below(corpus.size())];
    if (below(50) == 0) {
      s.resize(below(600));
      for (char& c : s) c = random_char();
    }
    for (size_t n = 1 + below(5); n > 0; --n) step(&s, corpus);
    if (s.size() > kLargest) s.resize(kLargest);
    return s;
  }

 private:
  char random_char() { return static_cast<char>(below(256)); }

  void step(std::string* s, const std::vector<std::string>& corpus) {
    constexpr uint64_t kEdges[] = {0, 1, 127, 128, 255, 256, 32767, 65535, 1u << 26, 0x7fffffff, 0xffffffff, 1ull << 63, ~0ull};
    const size_t at = below(s->size() + 1);
    switch (below(9)) {
      case 0:
        if (at < s->size()) (*s)[at] = static_cast<char>((*s)[at] ^ (1 << below(8)));
        break;
      case 1:
        if (at < s->size()) (*s)[at] = random_char();
        break;
      case 2:
        if (at < s->size()) (*s)[at] = static_cast<char>((*s)[at] + (below(2) ? 1 : -1));
        break;
      case 3: {  // a number at the edge of its range
        const uint64_t value = kEdges[below(std::size(kEdges))];
        const size_t width = size_t{1} << below(4);
        for (size_t i = 0; i < width && at + i < s->size(); ++i) (*s)[at + i] = static_cast<char>(value >> (8 * i));
        break;
      }
      case 4: s->insert(at, 1 + below(4), random_char()); break;
      case 5: s->erase(at, 1 + below(8)); break;
      case 6: s->insert(at, s->substr(below(s->size() + 1), below(80))); break;
      case 7: s->resize(at); break;
      default: {
        const std::string& other = corpus[below(corpus.size())];
        s->replace(at, std::string::npos, other.substr(below(other.size() + 1)));
      }
    }
  }

  std::mt19937_64 dice_;
};

void run(const std::string& input) {
  current = input;
  ::alarm(kHangSeconds);
  // Exactly as long as it is, on the heap: the sanitizer sees a byte too far.
  const std::vector<uint8_t> copy(input.begin(), input.end());
  LLVMFuzzerTestOneInput(copy.data(), copy.size());
  ::alarm(0);
}

long peak_megabytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss / 1024;
}

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "fuzz: cannot read %s\n", path.c_str());
    std::exit(2);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}
}  // namespace

// Called by the compiler at every block of the code under test.
extern "C" void __sanitizer_cov_trace_pc() {
  const auto pc = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  unsigned char& s = seen[(pc ^ (pc >> 16)) % kMap];
  if (s == 0) {
    s = 1;
    new_code = true;
  }
}

// A single huge request is an error too; a small quarantine, so that what counts is what the code keeps.
extern "C" const char* __asan_default_options() { return "quarantine_size_mb=16:max_allocation_size_mb=256"; }
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1"; }

extern "C" void __sanitizer_set_death_callback(void (*)()) __attribute__((weak));

int main(int argc, char** argv) {
  double seconds = 10;
  long runs = -1;
  uint64_t seed = 1;
  std::vector<std::string> files;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.rfind("--", 0) != 0) {
      files.push_back(word);
      continue;
    }
    if (i + 1 == argc) {
      std::fprintf(stderr, "fuzz: %s needs a value\n", word.c_str());
      return 2;
    }
    const std::string value = argv[++i];
    if (word == "--seconds") seconds = std::strtod(value.c_str(), nullptr);
    else if (word == "--runs") runs = std::strtol(value.c_str(), nullptr, 10);
    else if (word == "--seed") seed = std::strtoull(value.c_str(), nullptr, 10);
    else if (word == "--save") save_to = value;
    else {
      std::fprintf(stderr, "fuzz: no such option: %s\n", word.c_str());
      return 2;
    }
  }
  for (const int number : {SIGALRM, SIGABRT}) std::signal(number, on_signal);
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(save);
  for (const std::string& f : files) run(content(f));
  if (!files.empty()) return 0;

  std::vector<std::string> corpus = fuzz_seeds();
  for (const std::string& s : corpus) run(s);
  Mutator mutator(seed);
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  const long memory = peak_megabytes();
  long done = 0;
  for (; runs < 0 ? std::chrono::steady_clock::now() < until : done < runs; ++done) {
    new_code = false;
    run(mutator.mutate(corpus));
    if (new_code) corpus.push_back(current);
    if (done % 256 == 0 && peak_megabytes() > memory + kMoreMegabytes) {
      std::fprintf(stderr, "fuzz: memory grew by %ld MB\n", peak_megabytes() - memory);
      save();
      return 1;
    }
  }
  std::printf("%s: %ld inputs, seed %llu, %zu kept, %ld blocks of code, %ld MB more\n", argv[0], done,
              static_cast<unsigned long long>(seed), corpus.size(), static_cast<long>(std::count(seen.begin(), seen.end(), 1)),
              peak_megabytes() - memory);
  return 0;
}
