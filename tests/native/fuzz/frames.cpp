// Every parser of frame.h. The first byte chooses the parser, the second whether the proof is made good after the
// mutation, so that what lies behind it is reached too. What a parser takes, it must write again byte for byte.
#include <cstring>

#include "crypto.h"
#include "frame.h"
#include "fuzz.h"

using namespace ftar;

namespace {

const std::string kKey = link_key("a token of the fuzzer", "fuzz");
constexpr size_t kProof = 32;

Challenge challenge() {
  Challenge c;
  c.nonce = "0123456789abcdef";
  return c;
}

Hello hello() {
  Hello h;
  h.epoch = "epochepochepoch!";
  h.nonce = "noncenoncenonce!";
  h.from_incarnation = 3;
  h.to_incarnation = 4;
  h.udp_port = 7600;
  h.from = "r0";
  h.to = "r1";
  h.rail = "rail0";
  return h;
}

// The parsers read a fixed number of bytes: exactly so many are there, so that one byte too far is seen.
std::string exactly(std::string_view text, size_t n) {
  std::string out(text.substr(0, n));
  out.resize(n);
  return out;
}

const unsigned char* bytes(const std::string& s) { return reinterpret_cast<const unsigned char*>(s.data()); }

void frame(std::string_view text) {
  const std::string in = exactly(text, FrameHeader::kSize);
  FrameHeader h;
  if (h.parse(bytes(in)) != nullptr) return;
  must(h.length <= kMaxData, "a frame's length is bounded");
  must(h.offset <= h.total || h.total == 0 || static_cast<int>(h.type) != 1, "a data frame stays inside its message");
  unsigned char out[FrameHeader::kSize];
  h.write(out);
  must(std::memcmp(out, in.data(), sizeof out) == 0, "a frame's header is written as it was read");
}

void greeting(std::string_view text) {
  const std::string in = exactly(text, Challenge::kSize);
  Challenge c;
  if (c.parse(bytes(in)) != nullptr) return;
  unsigned char out[Challenge::kSize];
  c.write(out);
  must(std::memcmp(out + 8, in.data() + 8, 16) == 0, "a challenge keeps its nonce");
}

void dialler(std::string_view text, bool prove) {
  const std::string prefix = exactly(text, Hello::kPrefix);
  const char* error = nullptr;
  uint16_t version = 0;
  const size_t length = Hello::body_length(bytes(prefix), &version, &error);
  if (version != kWireVersion) return;
  must((length == 0) == (error != nullptr), "a hello has a length or an error");
  must(length <= Hello::kMaxBody, "a hello's length is bounded");
  std::string body(text.size() > Hello::kPrefix ? text.substr(Hello::kPrefix) : std::string_view());
  if (!prove && length > 0) body = exactly(body, length);
  if (prove && body.size() > kProof) {
    body.resize(body.size() - kProof);
    body.append(view(hmac_sha256(kKey, "dialler" + challenge().nonce + body)));
  }
  Hello h;
  if (h.parse(body, kKey, challenge()) != nullptr) return;
  must(h.write(kKey, challenge()).substr(Hello::kPrefix) == body, "a hello is written as it was read");
}

void acceptor(std::string_view text, bool prove) {
  std::string message(text);
  if (message.size() < Answer::kPrefix) message.resize(Answer::kPrefix);
  const char* error = nullptr;
  const size_t length = Answer::reason_length(bytes(message), &error);
  if (error != nullptr) return;
  message = exactly(message, Answer::kPrefix + length);
  if (prove) {
    std::string signed_text = "acceptor" + challenge().nonce + hello().nonce;
    signed_text.push_back(message[4]);
    signed_text.append(message.substr(Answer::kPrefix));
    const Hash proof = hmac_sha256(kKey, signed_text);
    std::memcpy(message.data() + 8, proof.data(), proof.size());
  }
  Answer a;
  if (a.parse(message, kKey, challenge(), hello()) != nullptr) return;
  must(a.reason == message.substr(Answer::kPrefix), "an answer keeps its reason");
}

void heartbeat(std::string_view text, bool prove) {
  std::string in(text);
  if (Beat::form(bytes(in), in.size()) != nullptr) return;
  const size_t proven = Beat::kHead + 8 * Beat::claimed_tags(bytes(in));
  in = exactly(in, proven + Beat::kMac);  // what is behind that is padding
  if (prove) {
    const Hash mac = hmac_sha256(kKey, std::string_view(in).substr(0, proven));
    std::memcpy(in.data() + proven, mac.data(), Beat::kMac);
  }
  Beat b;
  if (b.parse(bytes(in), in.size(), kKey) != nullptr) return;
  must(b.count >= 1 && b.count <= Beat::kMaxTags && b.size() <= Beat::kMost, "a heartbeat's length is bounded");
  unsigned char out[Beat::kMost];
  b.write(out, kKey);
  must(std::string_view(reinterpret_cast<const char*>(out), b.size()) == in, "a heartbeat is written as it was read");
}

std::string input(int parser, int prove, std::string_view message) {
  std::string out{static_cast<char>(parser), static_cast<char>(prove)};
  out.append(message);
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 4096) return 0;
  Cursor in(data, size);
  const int parser = in.byte() % 5;
  const bool prove = in.byte() % 2 == 1;
  const std::string_view text = in.rest();
  switch (parser) {
    case 0: frame(text); break;
    case 1: greeting(text); break;
    case 2: dialler(text, prove); break;
    case 3: acceptor(text, prove); break;
    default: heartbeat(text, prove); break;
  }
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  std::vector<std::string> out;
  for (int type = 1; type <= 12; ++type) {  // those that exist and a few that may come
    FrameHeader h;
    h.type = static_cast<FrameType>(type);
    h.generation = 1;
    h.tag = 77;
    h.length = type == 1 ? 100 : 0;
    h.total = type == 1 ? 1000 : 0;
    unsigned char header[FrameHeader::kSize];
    h.write(header);
    out.push_back(input(0, 0, {reinterpret_cast<const char*>(header), sizeof header}));
  }
  unsigned char nonce[Challenge::kSize];
  challenge().write(nonce);
  out.push_back(input(1, 0, {reinterpret_cast<const char*>(nonce), sizeof nonce}));
  for (int prove = 0; prove < 2; ++prove) {
    out.push_back(input(2, prove, hello().write(kKey, challenge())));
    for (const AnswerCode code : {AnswerCode::welcome, AnswerCode::parked, AnswerCode::refused, AnswerCode::over}) {
      out.push_back(input(3, prove, Answer{code, "a reason"}.write(kKey, challenge(), hello())));
    }
    for (int kind = 1; kind <= 4; ++kind) {
      for (const size_t count : {size_t{0}, size_t{1}, size_t{3}, Beat::kMaxTags}) {
        Beat b;
        b.kind = static_cast<BeatKind>(kind);
        b.count = static_cast<uint8_t>(count);
        b.tags = {77, 78, 79};
        b.missing = 2;
        b.seq = 5;
        b.time_ms = 1.5;
        unsigned char beat[Beat::kMost];
        b.write(beat, kKey);
        out.push_back(input(4, prove, {reinterpret_cast<const char*>(beat), b.size()}));
      }
    }
  }
  return out;
}
