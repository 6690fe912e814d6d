#include "lmcache/aesgcm_stage.h"

#include <stdexcept>

namespace lmcache {
namespace {

CipherObject cipher_object(const SerdeObject& object) {
    return {object.name_space, object.chunk_hash, object.earlier_parameters};
}

class AesGcmStage final : public SerdeStage {
public:
    explicit AesGcmStage(std::shared_ptr<const ObjectCipher> cipher) : cipher_(std::move(cipher)) {}

    bool may_leave_source() const override { return false; }

    std::size_t max_encoded_bytes(std::size_t source_bytes) const override { return source_bytes; }

    std::optional<std::size_t> encode(std::span<const std::byte> source, std::span<std::byte> destination,
                                      const SerdeObject& object, std::vector<std::byte>& parameters) const override {
        parameters.resize(kSealBytes);
        cipher_->seal(source, destination, cipher_object(object), std::span<std::byte, kSealBytes>(parameters));
        return source.size();
    }

    SerdeFault decode(std::span<const std::byte> source, std::span<std::byte> destination, const SerdeObject& object,
                      std::span<const std::byte> parameters) const override {
        switch (cipher_->open(source, destination, cipher_object(object), parameters)) {
            case OpenFault::kNone:
                return SerdeFault::kNone;
            case OpenFault::kForged:
                return SerdeFault::kCorrupt;
            case OpenFault::kUnknownKey:
                return SerdeFault::kUnreadable;
        }
        return SerdeFault::kFailed;
    }

private:
    const std::shared_ptr<const ObjectCipher> cipher_;
};

}  // namespace

std::shared_ptr<const SerdeStage> make_aesgcm_stage(std::shared_ptr<const ObjectCipher> cipher) {
    if (cipher == nullptr) throw std::invalid_argument("a stage needs a cipher");
    return std::make_shared<AesGcmStage>(std::move(cipher));
}

}  // namespace lmcache
