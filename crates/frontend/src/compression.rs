//! Content codings of requests and answers over HTTP and gRPC: `gzip` and `deflate`.

use std::io::{BufRead, BufReader, Read};

use bytes::Bytes;
use downbeat_protocol::pace;
use downbeat_service::budget::Reservation;
use downbeat_service::client::Client;
use downbeat_service::error::ServiceError;
use downbeat_service::work::offload;
use flate2::Compression;
use flate2::bufread::{GzDecoder, GzEncoder, ZlibEncoder};
use flate2::read::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};

/// A content coding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Coding {
    /// RFC 1952.
    Gzip,
    /// The zlib format (RFC 1950), which HTTP and gRPC call `deflate`.
    Deflate,
}

/// Why a body could not be decompressed.
#[derive(Debug)]
pub enum InflateError {
    /// The body is not in this coding, or cut off.
    Malformed(std::io::Error),
    /// The decompressed body would be larger than the limit.
    TooLarge,
    /// The budget has no room for the decompressed bytes.
    Refused(ServiceError),
}

/// Bytes that are decompressed between two looks at the budget.
const STEP: usize = 256 << 10;
/// Compressed bodies below this size may turn out small: decompressing is tried at once, for about
/// a millisecond.
const TRIED_BELOW: usize = 16 << 10;
/// Compressed bytes between two steps. Each gzip member of them costs some microseconds, and may be
/// 20 bytes long.
const SLICE: usize = 4 << 10;
/// The time that a compressed byte takes at most, in bytes of JSON read.
const INFLATE_COST: u64 = 16;
/// The time that compressing a byte takes, in the same unit.
const DEFLATE_COST: u64 = 4;

impl Coding {
    /// The name in `Content-Encoding` and `grpc-encoding`.
    pub fn name(self) -> &'static str {
        match self {
            Coding::Gzip => "gzip",
            Coding::Deflate => "deflate",
        }
    }

    /// Decompresses at most `limit` bytes, beside the event loop if they may be many. `held` then
    /// holds the decompressed bytes instead of the compressed ones.
    pub async fn inflate(
        self,
        client: Client,
        body: Bytes,
        limit: usize,
        mut held: Reservation,
    ) -> Result<(Bytes, Reservation), InflateError> {
        if body.len() < TRIED_BELOW {
            match self.inflate_small(&body, limit.min(offload::PARSE_FROM), &mut held) {
                None => {}
                Some(Err(InflateError::TooLarge)) if limit > offload::PARSE_FROM => {}
                Some(out) => return out.map(|out| (out, held)),
            }
        }
        let length = body.len();
        let work = move || {
            let out = self.inflate_now(&body, limit, &mut held);
            drop(body);
            out.map(|out| (out, held))
        };
        offload::run(client, length, work).await.unwrap_or_else(|error| Err(InflateError::Refused(error)))
    }

    /// Decompresses on the event loop. `None`: a gzip body has several members, of which each may
    /// take its time.
    fn inflate_small(self, body: &[u8], limit: usize, held: &mut Reservation) -> Option<Result<Bytes, InflateError>> {
        if self == Coding::Deflate {
            return Some(self.inflate_now(body, limit, held));
        }
        let (mut member, before) = (GzDecoder::new(body), held.bytes());
        let out = read_to_limit(&mut member, body.len(), limit, held);
        if out.is_err() || member.get_ref().is_empty() {
            return Some(out);
        }
        // The first member is read again with the others.
        held.shrink_to(before);
        held.grow(before - held.bytes()).err().map(|error| Err(InflateError::Refused(error)))
    }

    fn inflate_now(self, body: &[u8], limit: usize, held: &mut Reservation) -> Result<Bytes, InflateError> {
        match self {
            Coding::Gzip => read_to_limit(MultiGzDecoder::new(Steps(body, INFLATE_COST)), body.len(), limit, held),
            // Some clients send it without the zlib header.
            Coding::Deflate if is_zlib(body) => {
                read_to_limit(ZlibDecoder::new(Steps(body, INFLATE_COST)), body.len(), limit, held)
            }
            Coding::Deflate => read_to_limit(DeflateDecoder::new(Steps(body, INFLATE_COST)), body.len(), limit, held),
        }
    }

    /// Compresses; fast rather than small.
    pub fn deflate(self, body: &[u8]) -> std::io::Result<Bytes> {
        let room = body.len() / 2;
        if body.len() < offload::PARSE_FROM {
            return self.compress(body, room);
        }
        self.compress(BufReader::with_capacity(SLICE, Steps(body, DEFLATE_COST)), room)
    }

    fn compress(self, body: impl BufRead, room: usize) -> std::io::Result<Bytes> {
        let mut out = Vec::with_capacity(room);
        match self {
            Coding::Gzip => GzEncoder::new(body, Compression::fast()).read_to_end(&mut out)?,
            Coding::Deflate => ZlibEncoder::new(body, Compression::fast()).read_to_end(&mut out)?,
        };
        Ok(Bytes::from(out))
    }
}

/// Bytes that are read in steps, with the cost of a step.
struct Steps<'a>(&'a [u8], u64);

impl Read for Steps<'_> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let most = buf.len().min(SLICE);
        let read = self.0.read(buf.get_mut(..most).unwrap_or_default())?;
        pace::step(self.1 * read as u64);
        Ok(read)
    }
}

/// Whether a zlib header starts here (RFC 1950, section 2.2).
fn is_zlib(body: &[u8]) -> bool {
    matches!(body, [method, flags, ..] if method & 0x0f == 8 && (u16::from(*method) << 8 | u16::from(*flags)) % 31 == 0)
}

fn read_to_limit(
    mut decoder: impl Read,
    compressed: usize,
    limit: usize,
    held: &mut Reservation,
) -> Result<Bytes, InflateError> {
    let before = held.bytes();
    let mut out = Vec::new();
    let outcome = loop {
        let room = STEP.min(limit.saturating_sub(out.len()).saturating_add(1));
        if let Err(error) = held.grow(room as u64) {
            break Err(InflateError::Refused(error));
        }
        let read = decoder.by_ref().take(room as u64).read_to_end(&mut out);
        pace::step(*read.as_ref().unwrap_or(&0) as u64 / 4);
        match read {
            Err(error) => break Err(InflateError::Malformed(error)),
            Ok(_) if out.len() > limit => break Err(InflateError::TooLarge),
            Ok(read) if read < room => break Ok(()),
            Ok(_) => {}
        }
    };
    match outcome {
        Ok(()) => {
            // The caller gives the compressed bytes up.
            held.shrink_to(before.saturating_sub(compressed as u64) + out.len() as u64);
            Ok(Bytes::from(out))
        }
        Err(error) => {
            held.shrink_to(before);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use downbeat_service::budget::ByteBudget;

    use super::*;

    fn inflate(coding: Coding, body: &[u8], limit: usize) -> Result<Bytes, InflateError> {
        coding.inflate_now(body, limit, &mut ByteBudget::unbounded().reservation())
    }

    #[test]
    fn what_is_coded_is_decoded_within_the_limit() {
        let body = vec![7_u8; 1_000_000];
        for coding in [Coding::Gzip, Coding::Deflate] {
            let coded = coding.deflate(&body).unwrap();
            assert!(coded.len() < 20_000);
            assert_eq!(inflate(coding, &coded, 1_000_000).unwrap(), body);
            assert!(matches!(inflate(coding, &coded, 999_999), Err(InflateError::TooLarge)));
            assert!(matches!(inflate(coding, &coded[..coded.len() / 2], 1 << 20), Err(InflateError::Malformed(_))));
        }
        let mut bare = flate2::write::DeflateEncoder::new(Vec::new(), Compression::fast());
        bare.write_all(&body).unwrap();
        assert_eq!(inflate(Coding::Deflate, &bare.finish().unwrap(), 1_000_000).unwrap(), body);
    }

    #[tokio::test]
    async fn a_small_body_of_many_members_is_not_read_on_the_event_loop() {
        let members = Coding::Gzip.deflate(b"ab").unwrap().repeat(100);
        let budget = ByteBudget::new(1 << 20);
        let mut held = budget.reservation();
        held.grow(members.len() as u64).unwrap();
        assert!(Coding::Gzip.inflate_small(&members, 1 << 20, &mut held).is_none());
        assert_eq!(held.bytes(), members.len() as u64);
        let (out, held) = Coding::Gzip.inflate(Client::HERE, members.into(), 1 << 20, held).await.unwrap();
        assert_eq!((out.as_ref(), held.bytes()), (b"ab".repeat(100).as_slice(), 200));
    }

    #[test]
    fn what_comes_out_is_held_by_the_budget() {
        let coded = Coding::Gzip.deflate(&vec![7_u8; 1_000_000]).unwrap();
        let budget = ByteBudget::new(700_000);
        let mut held = budget.reservation();
        held.grow(coded.len() as u64).unwrap();
        let refused = Coding::Gzip.inflate_now(&coded, 1 << 30, &mut held);
        assert!(matches!(refused, Err(InflateError::Refused(_))), "{refused:?}");
        assert_eq!(budget.in_flight(), coded.len() as u64);
        let roomy = ByteBudget::new(4 << 20);
        let mut held = roomy.reservation();
        held.grow(coded.len() as u64).unwrap();
        Coding::Gzip.inflate_now(&coded, 1 << 30, &mut held).unwrap();
        assert_eq!(roomy.in_flight(), 1_000_000);
    }
}
