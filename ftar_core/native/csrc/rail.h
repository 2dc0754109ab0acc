// One TCP connection of a link on a rail: the handshake of both ends, then frames.
//
// The connection moves bytes and knows frames; what they mean is its user's (a link end). Sending pulls: when the socket
// takes more, the user is asked for the next data frame, whose payload goes to the kernel straight from the caller's
// memory. Receiving places: the user names the destination of a data frame and the kernel writes there; only what came
// in one read with a header passes through a small staging buffer. A user that has no place yet pauses the connection
// and the sender is held back by TCP. Anything that is not a valid frame ends the connection, and nothing else.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "frame.h"
#include "netio.h"

namespace ftar {

class Conn;
class Transport;

struct Placement {
  enum class Kind { here, later, refused } kind;
  std::byte* into = nullptr;      // here
  const char* reason = nullptr;   // refused
};

// How a connection ended.
enum class ConnEnd {
  here,      // we ended it, or the network did
  peer,      // end of stream or reset: by the peer, or by its kernel for a connection that it does not know any more
  refused,   // nobody listens there: the peer's process has ended
  over,      // the peer proved who it is and knows that this link is over
  version,   // the other side speaks another version
  answered,  // it was only to find out whether somebody answers, and somebody does
};

class ConnUser {
 public:
  virtual ~ConnUser() = default;
  virtual void conn_open(Conn& conn) = 0;    // the acceptor welcomed us
  virtual void conn_parked(Conn& conn) = 0;  // it will, when it has heard of the epoch
  virtual void conn_heard(Conn& conn) = 0;
  virtual Placement data_begins(Conn& conn, const FrameHeader& header) = 0;
  virtual void data_arrived(Conn& conn, size_t bytes) = 0;
  virtual void data_complete(Conn& conn, const FrameHeader& header) = 0;
  // nullptr, or why the connection must end.
  virtual const char* control(Conn& conn, const FrameHeader& header, std::string_view text) = 0;
  virtual void batch_done(Conn& conn) = 0;  // everything readable was read
  virtual bool next_frame(Conn& conn, FrameHeader* header, const std::byte** payload) = 0;
  virtual void conn_closed(Conn& conn, const std::string& reason, ConnEnd end) = 0;
};

class Conn {
 public:
  enum class Stage {
    connecting,  // dialler: TCP
    challenge,   // dialler: waits for the acceptor's nonce
    answer,      // dialler: waits for its verdict (perhaps parked)
    hello,       // acceptor: waits for the dialler's proof; a stranger until then
    parked,      // acceptor: the proof is good; waits for admission
    open,
    closed,
  };

  Conn(Transport& transport, int fd, int rail, uint64_t id);  // accepted
  // Dialled. A hello without an epoch never gets sent: the acceptor's challenge is all that is wanted. `key` is the
  // acceptor's.
  Conn(Transport& transport, int fd, int rail, uint64_t id, Hello hello, const std::string& key, ConnUser* user, int slot);
  ~Conn();
  Conn(const Conn&) = delete;
  Conn& operator=(const Conn&) = delete;

  void on_event(uint32_t epoll_events);
  void admit(ConnUser* user, int slot);       // parked -> open
  // parked -> closed. over: no other rail and no later attempt will do better.
  void refuse(const std::string& reason, bool over = false);
  void tell_parked();
  void send_control(FrameHeader header, std::string_view text = {});
  void flush();         // send what can be sent; pulls data frames
  void kick();          // ask the user again for the place of the frame that waits, and for frames to send
  void kick_later();    // the same, on the I/O thread
  // A caller that waits for what this connection brings watches it itself, and the I/O thread does not meanwhile: two
  // threads that wake for the same bytes cost more than the bytes.
  void lend(bool lent);
  short poll_events() const;  // what to wait for in poll(2)
  // Close without telling the user. polite: deliver what is queued (a goodbye); else reset, so that nothing of this
  // connection reaches the peer any more, not even when a dead rail comes back.
  void close(bool polite);
  void fail(const std::string& reason, ConnEnd end);  // close and tell the user

  uint64_t id() const { return id_; }
  int rail() const { return rail_; }  // the transport's index
  int slot() const { return slot_; }  // the link's index
  int fd() const { return fd_; }
  Stage stage() const { return stage_; }
  bool is_open() const { return stage_ == Stage::open; }
  bool paused() const { return paused_; }  // its user has no place for the next frame
  bool dialled() const { return dialled_; }
  bool parked_by_peer() const { return parked_by_peer_; }
  const Hello& hello() const { return hello_; }
  double deadline_ms() const { return deadline_ms_; }
  double since_ms() const { return since_ms_; }
  Address peer_address() const;
  Address local_address() const;
  uint64_t bytes_sent() const { return bytes_sent_; }
  uint64_t bytes_received() const { return bytes_received_; }
  size_t unsent() const { return payload_left_; }  // of the present data frame, what the kernel has not taken
  bool sending_frame() const { return header_at_ < FrameHeader::kSize || payload_left_ > 0; }

 private:
  void on_readable();
  bool consume();  // false when it needs more bytes, is paused or closed
  bool consume_handshake();
  bool consume_frame();
  void set_mask();
  void later(double ms);

  static constexpr size_t kStaging = 8192;

  Transport& transport_;
  int fd_;
  int rail_;
  int slot_ = -1;
  uint64_t id_;
  bool dialled_;
  Stage stage_;
  ConnUser* user_ = nullptr;
  std::string key_;
  Hello hello_;
  Challenge challenge_;
  bool parked_by_peer_ = false;
  double deadline_ms_ = 0;
  double since_ms_ = 0;
  uint32_t mask_ = 0;

  // receiving
  bool paused_ = false;
  bool lent_ = false;
  size_t begin_ = 0;
  size_t end_ = 0;
  FrameHeader in_;
  bool in_data_ = false;
  std::byte* in_place_ = nullptr;
  size_t in_left_ = 0;
  uint64_t bytes_received_ = 0;

  // sending
  bool want_write_ = false;
  std::string out_;
  size_t header_at_ = FrameHeader::kSize;
  const std::byte* payload_ = nullptr;
  size_t payload_left_ = 0;
  uint64_t bytes_sent_ = 0;
  unsigned char header_[FrameHeader::kSize];
  unsigned char staging_[kStaging];
};

}  // namespace ftar
