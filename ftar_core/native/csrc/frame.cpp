// See frame.h.
#include "frame.h"

#include <bit>
#include <cstring>

#include "bytes.h"

namespace ftar {

namespace {

constexpr uint32_t kFrameMagic = 0x324c5446;      // "FTL2"
constexpr uint32_t kChallengeMagic = 0x434c5446;  // "FTLC"
constexpr uint32_t kHelloMagic = 0x484c5446;      // "FTLH"
constexpr uint32_t kAnswerMagic = 0x414c5446;     // "FTLA"
constexpr uint32_t kBeatMagic = 0x424c5446;       // "FTLB"
constexpr size_t kNonce = 16;
constexpr size_t kEpoch = 16;
constexpr size_t kProof = 32;
constexpr size_t kMaxName = 127;
constexpr size_t kMaxReason = 240;

std::string_view chars(const unsigned char* p, size_t n) { return {reinterpret_cast<const char*>(p), n}; }

void append_name(std::string* out, std::string_view name) {
  const size_t n = name.size() < kMaxName ? name.size() : kMaxName;
  out->push_back(static_cast<char>(n));
  out->append(name.substr(0, n));
}

void append64(std::string* out, uint64_t v) {
  unsigned char b[8];
  put64(b, v);
  out->append(chars(b, 8));
}

bool take(std::string_view* from, size_t n, std::string_view* out) {
  if (from->size() < n) return false;
  *out = from->substr(0, n);
  from->remove_prefix(n);
  return true;
}

bool take_name(std::string_view* from, std::string* out) {
  std::string_view length, name;
  if (!take(from, 1, &length)) return false;
  const size_t n = static_cast<unsigned char>(length[0]);
  if (n == 0 || n > kMaxName || !take(from, n, &name)) return false;
  *out = name;
  return true;
}

Hash hello_proof(std::string_view key, const Challenge& challenge, std::string_view body) {
  return hmac_sha256(key, "dialler" + challenge.nonce + std::string(body));
}

Hash answer_proof(std::string_view key, const Challenge& challenge, const Hello& hello, AnswerCode code,
                  std::string_view reason) {
  std::string text = "acceptor" + challenge.nonce + hello.nonce;
  text.push_back(static_cast<char>(code));
  text.append(reason);
  return hmac_sha256(key, text);
}

}  // namespace

void FrameHeader::write(unsigned char* out) const {
  put32(out, kFrameMagic);
  out[4] = static_cast<unsigned char>(type);
  out[5] = flags;
  put16(out + 6, rail);
  put32(out + 8, generation);
  put32(out + 12, length);
  put64(out + 16, tag);
  put64(out + 24, seq);
  put64(out + 32, offset);
  put64(out + 40, total);
  put64(out + 48, step);
  put32(out + 56, bucket);
  put32(out + 60, part);
}

const char* FrameHeader::parse(const unsigned char* in) {
  if (get32(in) != kFrameMagic) return "not a frame of this version";
  if (in[4] < static_cast<uint8_t>(FrameType::data) || in[4] > static_cast<uint8_t>(FrameType::endpoint)) {
    return "a frame of unknown type";
  }
  type = static_cast<FrameType>(in[4]);
  flags = in[5];
  rail = get16(in + 6);
  generation = get32(in + 8);
  length = get32(in + 12);
  tag = get64(in + 16);
  seq = get64(in + 24);
  offset = get64(in + 32);
  total = get64(in + 40);
  step = get64(in + 48);
  bucket = get32(in + 56);
  part = get32(in + 60);
  if (type == FrameType::data) {
    if (length > kMaxData) return "a data frame longer than the limit";
    if (offset > total || length > total - offset) return "a data frame that reaches beyond its message";
    if (length == 0 && total != 0) return "an empty part of a message that is not empty";
    return nullptr;
  }
  if (length > kMaxControlText) return "a control frame longer than the limit";
  const bool text = type == FrameType::notice || type == FrameType::goodbye || type == FrameType::endpoint;
  if (length != 0 && !text) return "a control frame with a payload";
  return nullptr;
}

std::string other_version(uint16_t theirs) {
  return "speaks wire version " + std::to_string(theirs) + ", this is " + std::to_string(kWireVersion) +
         ": install the same ftctl on all nodes";
}

void Challenge::write(unsigned char* out) const {
  put32(out, kChallengeMagic);
  put16(out + 4, kWireVersion);
  put16(out + 6, 0);
  std::memcpy(out + 8, nonce.data(), kNonce);
}

const char* Challenge::parse(const unsigned char* in) {
  if (get32(in) != kChallengeMagic) return "the other side is not a rank of ftar";
  version = get16(in + 4);
  nonce = chars(in + 8, kNonce);
  return nullptr;
}

std::string Hello::write(std::string_view key, const Challenge& challenge) const {
  std::string body = epoch + nonce;
  append64(&body, from_incarnation);
  append64(&body, to_incarnation);
  unsigned char port[2];
  put16(port, udp_port);
  body.append(chars(port, 2));
  append_name(&body, from);
  append_name(&body, to);
  append_name(&body, rail);
  unsigned char prefix[kPrefix];
  put32(prefix, kHelloMagic);
  put16(prefix + 4, kWireVersion);
  put16(prefix + 6, static_cast<uint16_t>(body.size() + kProof));
  std::string out{chars(prefix, kPrefix)};
  out.append(body);
  out.append(view(hello_proof(key, challenge, body)));
  return out;
}

std::string Hello::version_only() {
  unsigned char prefix[kPrefix];
  put32(prefix, kHelloMagic);
  put16(prefix + 4, kWireVersion);
  put16(prefix + 6, 0);
  return std::string{chars(prefix, kPrefix)};
}

size_t Hello::body_length(const unsigned char* prefix, uint16_t* version, const char** error) {
  const size_t length = get16(prefix + 6);
  *version = get16(prefix + 4);
  *error = get32(prefix) != kHelloMagic ? "not a rank of ftar" : nullptr;
  if (*error == nullptr && *version == kWireVersion && (length <= kProof || length > kMaxBody)) {
    *error = "a hello of impossible length";
  }
  return *error == nullptr ? length : 0;
}

const char* Hello::parse(std::string_view body, std::string_view key, const Challenge& challenge) {
  if (body.size() <= kProof) return "a hello of impossible length";
  const std::string_view proof = body.substr(body.size() - kProof);
  body.remove_suffix(kProof);
  if (!equal_secret(proof, view(hello_proof(key, challenge, body)))) return "a wrong token or another job";
  std::string_view e, n, numbers;
  if (!take(&body, kEpoch, &e) || !take(&body, kNonce, &n) || !take(&body, 18, &numbers)) return "a hello that is too short";
  epoch = e;
  nonce = n;
  const auto* p = reinterpret_cast<const unsigned char*>(numbers.data());
  from_incarnation = get64(p);
  to_incarnation = get64(p + 8);
  udp_port = get16(p + 16);
  if (!take_name(&body, &from) || !take_name(&body, &to) || !take_name(&body, &rail) || !body.empty()) {
    return "a hello with malformed names";
  }
  return nullptr;
}

std::string Answer::write(std::string_view key, const Challenge& challenge, const Hello& hello) const {
  const std::string text = reason.substr(0, kMaxReason);
  unsigned char prefix[8];
  put32(prefix, kAnswerMagic);
  prefix[4] = static_cast<unsigned char>(code);
  prefix[5] = 0;
  put16(prefix + 6, static_cast<uint16_t>(text.size()));
  std::string out{chars(prefix, 8)};
  out.append(view(answer_proof(key, challenge, hello, code, text)));
  out.append(text);
  return out;
}

size_t Answer::reason_length(const unsigned char* prefix, const char** error) {
  const size_t length = get16(prefix + 6);
  *error = get32(prefix) != kAnswerMagic ? "the other side's answer is not one"
           : prefix[4] > 3               ? "an answer of unknown kind"
           : length > kMaxReason         ? "an answer of impossible length"
                                         : nullptr;
  return *error == nullptr ? length : 0;
}

const char* Answer::parse(std::string_view message, std::string_view key, const Challenge& challenge, const Hello& hello) {
  const std::string_view proof = message.substr(8, kProof);
  code = static_cast<AnswerCode>(message[4]);
  reason = message.substr(kPrefix);
  if (!equal_secret(proof, view(answer_proof(key, challenge, hello, code, reason)))) {
    return "the other side does not know the job token";
  }
  return nullptr;
}

void Beat::write(unsigned char* out, std::string_view key) const {
  put32(out, kBeatMagic);
  out[4] = static_cast<unsigned char>(kWireVersion);
  out[5] = static_cast<unsigned char>(kind);
  out[6] = count;
  out[7] = flags;
  put64(out + 8, seq);
  put64(out + 16, std::bit_cast<uint64_t>(time_ms));
  put64(out + 24, missing);
  for (size_t i = 0; i < count; ++i) put64(out + kHead + 8 * i, tags[i]);
  const size_t proven = size() - kMac;
  const Hash mac = hmac_sha256(key, chars(out, proven));
  std::memcpy(out + proven, mac.data(), kMac);
}

const char* Beat::form(const unsigned char* in, size_t size) {
  if (size < kHead || get32(in) != kBeatMagic || in[4] != kWireVersion) return "not a heartbeat of this version";
  if (in[5] < 1 || in[5] > 3) return "a heartbeat of unknown kind";
  if (in[6] < 1 || in[6] > kMaxTags || size < kHead + 8u * in[6] + kMac) return "a heartbeat of impossible length";
  return nullptr;
}

uint64_t Beat::claimed_tag(const unsigned char* in, size_t i) { return get64(in + kHead + 8 * i); }

const char* Beat::parse(const unsigned char* in, size_t size, std::string_view key) {
  if (const char* error = form(in, size)) return error;
  const size_t proven = kHead + 8u * in[6];
  if (!equal_secret(chars(in + proven, kMac), view(hmac_sha256(key, chars(in, proven))).substr(0, kMac))) {
    return "a heartbeat that nobody of this job wrote";
  }
  kind = static_cast<BeatKind>(in[5]);
  count = in[6];
  flags = in[7];
  seq = get64(in + 8);
  time_ms = std::bit_cast<double>(get64(in + 16));
  missing = get64(in + 24);
  for (size_t i = 0; i < count; ++i) tags[i] = claimed_tag(in, i);
  return nullptr;
}

std::string link_key(std::string_view token, std::string_view job) {
  return std::string(view(hmac_sha256(token, "ftar link 1 " + std::string(job))));
}

uint64_t link_tag(std::string_view key, const Hello& hello) {
  std::string text = "link" + hello.epoch;
  append64(&text, hello.from_incarnation);
  append64(&text, hello.to_incarnation);
  append_name(&text, hello.from);
  append_name(&text, hello.to);
  return get64(hmac_sha256(key, text).data());
}

}  // namespace ftar
