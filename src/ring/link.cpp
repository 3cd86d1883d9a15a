#include "ring/link.h"

#include <utility>

namespace annulus::ring {

void Batch::add(Way way, int peer, std::uint32_t tag, const Mailbox& box, std::int64_t offset,
                std::int64_t bytes) {
  messages.push_back({way, peer, tag, &box.region, offset, bytes});
  boxes.push_back(&box);
}

Link::Link(Transport& transport, Backend& backend, std::shared_ptr<Queue> queue)
    : transport_(&transport),
      backend_(&backend),
      queue_(std::move(queue)),
      copies_(backend.immediate() ? nullptr : backend.make_queue()),
      staged_(!backend.immediate() && !transport.reaches(backend.device())) {}

Mailbox Link::make_mailbox(std::int64_t bytes, const char* what) {
  Mailbox box;
  box.memory = backend_->allocate(bytes, what);
  if (staged_) box.staging = backend_->allocate_staging(bytes, what);
  box.region = staged_ ? transport_->expose(box.staging.span(), Device{}, nullptr)
                       : transport_->expose(box.memory.span(), box.memory.device(), copies_);
  return box;
}

std::unique_ptr<Ticket> Link::post(const Batch& batch, const Event& after) {
  if (batch.messages.empty()) return nullptr;
  if (!staged_) return transport_->post(batch.messages, after);
  copies_->wait(after);
  for (std::size_t i = 0; i < batch.messages.size(); ++i) {
    const Message& message = batch.messages[i];
    const Mailbox& box = *batch.boxes[i];
    if (message.way == Way::receive || message.bytes == 0) continue;
    copies_->copy(box.staging.data() + message.offset, box.data() + message.offset, message.bytes);
  }
  return transport_->post(batch.messages, copies_->record());
}

void Link::wait(const Batch& batch, std::unique_ptr<Ticket>& ticket) {
  if (ticket == nullptr) return;
  if (!staged_) {
    ticket->wait(*queue_);
  } else {
    ticket->wait();
    for (std::size_t i = 0; i < batch.messages.size(); ++i) {
      const Message& message = batch.messages[i];
      const Mailbox& box = *batch.boxes[i];
      if (message.way == Way::send || message.bytes == 0) continue;
      copies_->copy(box.data() + message.offset, box.staging.data() + message.offset,
                    message.bytes);
    }
    queue_->wait(copies_->record());
  }
  ticket.reset();
}

void Link::use_queue(std::shared_ptr<Queue> queue) {
  queue->follow(*queue_);
  queue_ = std::move(queue);
}

void Link::finish() {
  queue_->record().wait();
  // Of a batch that could not be posted: nobody else has waited for its way through the host.
  if (copies_ != nullptr) copies_->record().wait();
}

}  // namespace annulus::ring
