// Everything that travels on a rail, and the one strict parser of each.
//
// A data connection begins with a handshake that proves the job token both ways without sending it:
//
//     acceptor -> Challenge(nonce)
//     dialler  -> Hello(epoch, names, incarnations, rail, nonce, proof of both)
//     acceptor -> Answer(parked | welcome | refused | over, proof)   parked may come before one of the others
//
// and then carries frames: a header of 64 bytes and `length` bytes of payload. Every frame has the link's tag (a hash
// of epoch, both names and both incarnations). The sender's first frame on a connection is `open`, which gives it a
// number among all connections of the link, its generation; a data frame of another link or generation ends the
// connection. A data frame says by itself where it belongs (message, offset, length of both), so it may come over any
// connection. Heartbeats are datagrams with a MAC; one is for many links (paths.h). Numbers are little endian. A parser
// returns nullptr, or the sentence that says what is wrong; sizes are bounded before anything is stored.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "crypto.h"

namespace ftar {

inline constexpr uint16_t kWireVersion = 3;

enum class FrameType : uint8_t {
  data = 1,     // part of message `seq`, at `offset` of `total` bytes
  ack = 2,      // all messages below `seq` are complete at the receiver
  open = 3,     // sender: this connection is `generation`; `total`: my window; `step`: forget this rail's generations below
  lost = 4,     // sender: connection `generation` of `rail` is lost, what came on it? `step`: as above
  have = 5,     // receiver: `total` whole data frames and `offset` bytes of the next; all messages below `seq` complete
  carry = 6,    // sender: the rails in the set `total` (a bit each) carry the data now; news, nobody waits for it
  notice = 7,   // rail `rail` is dead for me, payload says why
  goodbye = 8,  // this link ends on purpose, payload says why; flags: kLeftEpoch
  endpoint = 9, // receiver: rail `rail` now listens at the host in the payload, port `seq`
};
inline constexpr uint8_t kAckSoon = 1;    // data: the sender's caller waits for the acknowledgement
inline constexpr uint8_t kPlanned = 2;    // carry: no connection was lost
inline constexpr uint8_t kLeftEpoch = 4;  // goodbye: the process lives on in another epoch

struct FrameHeader {
  static constexpr size_t kSize = 64;
  FrameType type = FrameType::data;
  uint8_t flags = 0;
  uint16_t rail = 0;
  uint32_t generation = 0;
  uint32_t length = 0;
  uint64_t tag = 0;
  uint64_t seq = 0;
  uint64_t offset = 0;
  uint64_t total = 0;
  // What the message is, for the receiver's user; a link only carries it.
  uint64_t step = 0;
  uint32_t bucket = 0;
  uint32_t part = 0;

  void write(unsigned char* out) const;
  const char* parse(const unsigned char* in);  // nullptr or what is wrong
};
inline constexpr uint32_t kMaxData = 64u << 20;   // payload of one data frame
inline constexpr uint32_t kMaxControlText = 240;  // payload of any other frame

// "speaks wire version 1, this is 3: ..."
std::string other_version(uint16_t theirs);

struct Challenge {
  static constexpr size_t kSize = 24;
  std::string nonce;  // 16 bytes
  uint16_t version = kWireVersion;
  void write(unsigned char* out) const;
  const char* parse(const unsigned char* in);  // any version: what another one has behind it is not looked at
};

struct Hello {
  static constexpr size_t kPrefix = 8;  // magic, version, length of the rest
  static constexpr size_t kMaxBody = 512;
  std::string epoch;  // 16 bytes
  std::string nonce;  // 16 bytes
  uint64_t from_incarnation = 0;
  uint64_t to_incarnation = 0;
  uint16_t udp_port = 0;
  std::string from;
  std::string to;
  std::string rail;

  // The whole message, with the proof that whoever wrote it knows the key and saw `challenge`.
  std::string write(std::string_view key, const Challenge& challenge) const;
  // The body's length of a message that begins with these kPrefix bytes; 0 and `error` if it is none. `version` is
  // theirs: of another one nothing else is looked at.
  static size_t body_length(const unsigned char* prefix, uint16_t* version, const char** error);
  // For an acceptor of another version: just enough to tell it ours.
  static std::string version_only();
  const char* parse(std::string_view body, std::string_view key, const Challenge& challenge);
};

// over: no other rail and no later attempt will do better
enum class AnswerCode : uint8_t { welcome = 0, parked = 1, refused = 2, over = 3 };

struct Answer {
  static constexpr size_t kPrefix = 40;  // magic, code, length of the reason, proof
  AnswerCode code = AnswerCode::welcome;
  std::string reason;

  std::string write(std::string_view key, const Challenge& challenge, const Hello& hello) const;
  static size_t reason_length(const unsigned char* prefix, const char** error);
  const char* parse(std::string_view message, std::string_view key, const Challenge& challenge, const Hello& hello);
};

enum class BeatKind : uint8_t { ping = 1, pong = 2, goodbye = 3 };
inline constexpr uint8_t kOwnEcho = 1;  // ping, pong: proves the rail for its one link alone, by its size

// A heartbeat. A ping asks about ends of links that have an open connection where it comes from; the pong gives it back
// and says which of them have none where it went. A goodbye is of one link. The tags name the ends at the addressee.
//
//     0  magic "FTLB"   4  version   5  kind   6  number of tags   7  flags   8  seq   16  time   24  missing, a bit a tag
//     32  tags, 8 bytes each; then the MAC (16). Anything behind that is padding.
struct Beat {
  static constexpr size_t kMaxTags = 60;  // 576 bytes with the headers of IP and UDP: what every path carries whole
  static constexpr size_t kHead = 32;
  static constexpr size_t kMac = 16;
  static constexpr size_t kMost = kHead + 8 * kMaxTags + kMac;
  BeatKind kind = BeatKind::ping;
  uint8_t flags = 0;
  uint8_t count = 0;
  uint64_t seq = 0;      // ping: a number; goodbye: messages complete
  double time_ms = 0;    // the pinger's clock, given back in the pong
  uint64_t missing = 0;  // pong
  std::array<uint64_t, kMaxTags> tags{};

  size_t size() const { return kHead + 8u * count + kMac; }
  void write(unsigned char* out, std::string_view key) const;  // size() bytes
  // nullptr, or why these bytes cannot be a heartbeat, before any proof: then they have claimed_tags() of them.
  static const char* form(const unsigned char* in, size_t size);
  static size_t claimed_tags(const unsigned char* in) { return in[6]; }
  static uint64_t claimed_tag(const unsigned char* in, size_t i);
  const char* parse(const unsigned char* in, size_t size, std::string_view key);
};

// What heartbeats call one end of a link.
inline uint64_t end_tag(uint64_t tag, bool sender) { return (tag & ~uint64_t{1}) | (sender ? 1 : 0); }
inline uint64_t other_end(uint64_t tag) { return tag ^ 1; }

std::string link_key(std::string_view token, std::string_view job);
uint64_t link_tag(std::string_view key, const Hello& hello);

}  // namespace ftar
