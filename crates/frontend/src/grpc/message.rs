//! Reads each incoming gRPC message as a whole. The size of one message is limited, and so are the
//! bytes of all requests together.
//!
//! tonic's own reader reserves the announced size and takes every byte. This reader counts a
//! message's bytes as they come, and does not wait for a message to a model that does not exist.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use downbeat_protocol::InferRequest;
use downbeat_protocol::grpc::{Peek, decoded_bytes, model_name, request_from_message};
use downbeat_protocol::inference::ModelInferRequest;
use downbeat_service::budget::{ByteBudget, Reservation};
use downbeat_service::client::Client;
use downbeat_service::error::ServiceError;
use downbeat_service::work::offload;
use futures_core::future::BoxFuture;
use http::{HeaderMap, HeaderName};
use http_body::{Body, Frame};
use parking_lot::Mutex;
use prost::Message as _;
use tonic::Status;

use crate::compression::{Coding, InflateError};

/// Bytes before each message: whether it is compressed, and its length.
pub(super) const PREFIX: usize = 5;
/// The coding of a call's messages.
pub(super) const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
/// Bytes reserved for a message before more of it has come.
const FIRST_RESERVE: usize = 1 << 20;
/// Messages from this size on may become much larger when they are read.
const ESTIMATED_FROM: usize = 16 << 10;
/// Messages from this size on are parsed beside the event loop: numbers that are not raw are parsed
/// one by one.
const READ_BESIDE_FROM: usize = 4 * offload::PARSE_FROM;

/// The coding that `header` names.
pub(super) fn coding(headers: &HeaderMap) -> Result<Option<Coding>, Status> {
    let Some(value) = headers.get(&ENCODING) else { return Ok(None) };
    match value.as_bytes() {
        b"identity" => Ok(None),
        b"gzip" => Ok(Some(Coding::Gzip)),
        b"deflate" => Ok(Some(Coding::Deflate)),
        _ => {
            let mut status =
                Status::unimplemented(format!("grpc-encoding is {value:?}; expected gzip, deflate or identity"));
            let metadata = status.metadata_mut();
            metadata
                .insert("grpc-accept-encoding", tonic::metadata::MetadataValue::from_static("identity,gzip,deflate"));
            Err(status)
        }
    }
}

/// The status for a message over the limit.
pub(super) fn too_large(limit: usize) -> Status {
    Status::resource_exhausted(format!(
        "the message is larger than allowed: the limit is {limit} bytes (--max-grpc-message-bytes)"
    ))
}

/// A message as it came.
pub(super) struct RawMessage {
    pub compressed: bool,
    pub bytes: Bytes,
    pub held: Reservation,
}

/// The result of reading.
pub(super) enum Received {
    Message(RawMessage),
    /// A message that is not taken, of which the rest is thrown away.
    Refused(ServiceError),
}

/// Looks at the first bytes of a message, to tell whether the rest is worth waiting for.
pub(super) type Doorkeeper = Arc<dyn Fn(&str) -> Result<(), ServiceError> + Send + Sync>;

/// The messages of a call.
pub(super) struct MessageReader<B> {
    body: B,
    limit: usize,
    /// Whether the call has named a coding.
    coded: bool,
    budget: Arc<ByteBudget>,
    /// Asked once for each message that does not come in one piece, with the name of its model.
    doorkeeper: Option<Doorkeeper>,
    /// Bytes that came early and belong to the next messages.
    rest: Bytes,
    prefix: [u8; PREFIX],
    prefixed: usize,
    partial: Option<Partial>,
    ended: bool,
}

/// A message that has come in part.
struct Partial {
    compressed: bool,
    /// Bytes that have not come.
    missing: usize,
    data: Vec<u8>,
    held: Reservation,
    /// The model is known to exist, or its name cannot be read.
    admitted: bool,
    refused: bool,
}

impl<B> MessageReader<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    /// Messages of at most `limit` bytes as sent.
    pub fn new(body: B, limit: usize, coded: bool, budget: Arc<ByteBudget>, doorkeeper: Option<Doorkeeper>) -> Self {
        MessageReader {
            body,
            limit,
            coded,
            budget,
            doorkeeper,
            rest: Bytes::new(),
            prefix: [0; PREFIX],
            prefixed: 0,
            partial: None,
            ended: false,
        }
    }

    /// The next message; `None` at the end of the call.
    ///
    /// # Errors
    /// The status that ends the call.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Received, Status>>> {
        loop {
            match self.take_rest() {
                Err(status) => {
                    self.ended = true;
                    self.rest = Bytes::new();
                    return Poll::Ready(Some(Err(status)));
                }
                Ok(Some(received)) => return Poll::Ready(Some(Ok(received))),
                Ok(None) if self.ended => {
                    let cut_off = self.prefixed > 0 || self.partial.as_ref().is_some_and(|partial| !partial.refused);
                    (self.prefixed, self.partial) = (0, None);
                    return Poll::Ready(
                        cut_off.then(|| Err(Status::internal("the call ended in the middle of a message"))),
                    );
                }
                Ok(None) => {}
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => self.rest = frame.into_data().unwrap_or_default(),
                Some(Err(error)) => {
                    self.ended = true;
                    (self.prefixed, self.partial) = (0, None);
                    return Poll::Ready(Some(Err(Status::from_error(error.into()))));
                }
                None => self.ended = true,
            }
        }
    }

    /// The next message.
    ///
    /// # Errors
    /// The async form of [`MessageReader::poll_next`].
    pub async fn next(&mut self) -> Option<Result<Received, Status>> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Reads from the bytes that have come; `None` if more are needed.
    fn take_rest(&mut self) -> Result<Option<Received>, Status> {
        if self.partial.is_none() {
            let Some(partial) = self.begin()? else { return Ok(None) };
            self.partial = Some(partial);
        }
        let Some(partial) = &mut self.partial else { return Ok(None) };
        if partial.refused {
            partial.missing -= self.rest.split_to(partial.missing.min(self.rest.len())).len();
            if partial.missing == 0 {
                self.partial = None;
                return if self.rest.is_empty() { Ok(None) } else { self.take_rest() };
            }
            return Ok(None);
        }
        let part = self.rest.split_to(partial.missing.min(self.rest.len()));
        match partial.take(part, self.doorkeeper.as_ref()) {
            Err(error) => {
                partial.refused = true;
                partial.data = Vec::new();
                partial.held.shrink_to(0);
                if partial.missing == 0 {
                    self.partial = None;
                }
                Ok(Some(Received::Refused(error)))
            }
            Ok(None) => Ok(None),
            Ok(Some(bytes)) => {
                let partial = self.partial.take();
                Ok(partial
                    .map(|Partial { compressed, held, .. }| Received::Message(RawMessage { compressed, bytes, held })))
            }
        }
    }

    /// Reads the prefix of the next message.
    fn begin(&mut self) -> Result<Option<Partial>, Status> {
        let free = self.prefix.get_mut(self.prefixed..).unwrap_or_default();
        let part = self.rest.split_to(free.len().min(self.rest.len()));
        free.iter_mut().zip(&part).for_each(|(to, from)| *to = *from);
        self.prefixed += part.len();
        if self.prefixed < PREFIX {
            return Ok(None);
        }
        self.prefixed = 0;
        let [flag, length @ ..] = self.prefix;
        let compressed = match flag {
            0 => false,
            1 if self.coded => true,
            1 => return Err(Status::internal("a compressed message in a call without 'grpc-encoding'")),
            other => return Err(Status::internal(format!("a message begins with the flag {other}; expected 0 or 1"))),
        };
        let missing = u32::from_be_bytes(length) as usize;
        if missing > self.limit {
            return Err(too_large(self.limit));
        }
        Ok(Some(Partial {
            compressed,
            missing,
            data: Vec::new(),
            held: self.budget.reservation(),
            admitted: compressed,
            refused: false,
        }))
    }
}

impl Partial {
    /// Takes a part, and returns the message once it is whole. A message that came in one piece is
    /// not copied.
    fn take(&mut self, part: Bytes, doorkeeper: Option<&Doorkeeper>) -> Result<Option<Bytes>, ServiceError> {
        self.missing -= part.len();
        self.held.grow(part.len() as u64)?;
        if self.missing == 0 && self.data.is_empty() {
            return Ok(Some(part));
        }
        if part.len() > self.data.capacity() - self.data.len() {
            // A client that has sent part of a message is trusted with its announced size. Its
            // pages stay with the system until they are written.
            let announced = part.len() + self.missing;
            let more = if self.data.is_empty() { announced.min(FIRST_RESERVE.max(part.len())) } else { announced };
            self.data.try_reserve_exact(more).map_err(|_| {
                ServiceError::Unavailable(format!(
                    "there is no memory for a message of {} bytes",
                    self.data.len() + announced
                ))
            })?;
        }
        self.data.extend_from_slice(&part);
        if self.missing == 0 {
            return Ok(Some(std::mem::take(&mut self.data).into()));
        }
        if !self.admitted
            && let Some(doorkeeper) = doorkeeper
        {
            match model_name(&self.data) {
                Peek::Short => {}
                Peek::Unknown => self.admitted = true,
                Peek::Name(name) => {
                    doorkeeper(name)?;
                    self.admitted = true;
                }
            }
        }
        Ok(None)
    }
}

impl RawMessage {
    /// The message with its coding undone, at most `limit` bytes.
    async fn decompressed(
        self,
        client: Client,
        coding: Option<Coding>,
        limit: usize,
    ) -> Result<(Bytes, Reservation), Status> {
        let RawMessage { compressed, bytes, held } = self;
        let Some(coding) = coding.filter(|_| compressed) else { return Ok((bytes, held)) };
        coding.inflate(client, bytes, limit, held).await.map_err(|error| match error {
            InflateError::Malformed(error) => Status::internal(format!(
                "the message is not compressed as grpc-encoding declares ({}): {error}",
                coding.name()
            )),
            InflateError::TooLarge => too_large(limit),
            InflateError::Refused(error) => error.into(),
        })
    }

    /// Parses the inference request. Returns it with the bytes that it holds of the budget.
    pub async fn inference(
        self,
        client: Client,
        coding: Option<Coding>,
        limit: usize,
    ) -> Result<(ModelInferRequest, Reservation), Status> {
        let (bytes, mut held) = self.decompressed(client, coding, limit).await?;
        let length = bytes.len();
        offload::run_if(length >= READ_BESIDE_FROM, client, length, move || {
            let before = held.bytes();
            if bytes.len() >= ESTIMATED_FROM {
                held.grow(decoded_bytes(&bytes))?;
            }
            let message = ModelInferRequest::decode(bytes)
                .map_err(|error| Status::internal(format!("the message is not a ModelInferRequest: {error}")))?;
            // Raw tensors are slices of the message. Others take more, and are counted as they are
            // brought into form.
            if message.inputs.iter().all(|input| input.contents.is_none()) {
                held.shrink_to(before);
            }
            Ok((message, held))
        })
        .await?
    }
}

/// The request in a message; numbers that are not raw are brought into form beside the event loop
/// if they are many.
pub(super) async fn read_request(
    client: Client,
    message: ModelInferRequest,
    mut held: Reservation,
) -> Result<(InferRequest, Reservation), ServiceError> {
    let length = usize::try_from(held.bytes()).unwrap_or(usize::MAX);
    offload::run_if(length >= READ_BESIDE_FROM, client, length, move || {
        let typed = message.inputs.iter().any(|input| input.contents.is_some());
        let request =
            request_from_message(message).map_err(|error| ServiceError::InvalidArgument(error.to_string()))?;
        if typed {
            held.shrink_to(request.inputs.iter().map(|input| input.data.len() as u64).sum());
        }
        Ok((request, held))
    })
    .await?
}

/// A body for tonic. Each message is whole when it begins, and its coding is undone: tonic would
/// undo the coding without the budget. [`WholeMessages::held`] has the last message's part of the
/// budget for as long as the call needs it.
pub(super) struct WholeMessages<B> {
    client: Client,
    reader: MessageReader<B>,
    coding: Option<Coding>,
    /// A message whose coding is being undone.
    inflating: Option<BoxFuture<'static, Result<(Bytes, Reservation), Status>>>,
    held: Arc<Mutex<Option<Reservation>>>,
}

impl<B> WholeMessages<B> {
    /// The messages that `reader` reads from a client, in this coding.
    pub fn new(client: Client, reader: MessageReader<B>, coding: Option<Coding>) -> Self {
        WholeMessages { client, reader, coding, inflating: None, held: Arc::default() }
    }

    /// The reservation of the last message.
    pub fn held(&self) -> Arc<Mutex<Option<Reservation>>> {
        Arc::clone(&self.held)
    }
}

/// A message with its prefix, in no coding.
fn framed(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(PREFIX + message.len());
    framed.extend_from_slice(&[0]);
    framed.extend_from_slice(&u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes());
    framed.extend_from_slice(message);
    framed.freeze()
}

impl<B> Body for WholeMessages<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let inflating = match &mut this.inflating {
            Some(inflating) => inflating,
            None => match ready!(this.reader.poll_next(cx)) {
                None => return Poll::Ready(None),
                Some(Err(status)) => return Poll::Ready(Some(Err(status))),
                Some(Ok(Received::Refused(error))) => return Poll::Ready(Some(Err(error.into()))),
                Some(Ok(Received::Message(message))) => {
                    let inflating = message.decompressed(this.client, this.coding, this.reader.limit);
                    this.inflating.insert(Box::pin(inflating))
                }
            },
        };
        let inflated = ready!(inflating.as_mut().poll(cx));
        this.inflating = None;
        Poll::Ready(Some(inflated.map(|(bytes, held)| {
            *this.held.lock() = Some(held);
            Frame::data(framed(&bytes))
        })))
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, StreamBody};

    use super::*;

    /// The results of a reader for `bytes` that come in pieces of `piece`.
    async fn read(
        bytes: Vec<u8>,
        piece: usize,
        budget: &Arc<ByteBudget>,
        doorkeeper: Option<Doorkeeper>,
    ) -> Vec<String> {
        let pieces: Vec<_> = bytes
            .chunks(piece)
            .map(|part| Ok::<_, std::io::Error>(Frame::data(Bytes::copy_from_slice(part))))
            .collect();
        let body = StreamBody::new(futures_util::stream::iter(pieces)).boxed();
        let mut reader = MessageReader::new(body, 1000, false, Arc::clone(budget), doorkeeper);
        let mut seen = Vec::new();
        while let Some(received) = reader.next().await {
            seen.push(match received {
                Ok(Received::Message(message)) => {
                    assert_eq!(message.held.bytes(), message.bytes.len() as u64);
                    format!("{:?}", message.bytes)
                }
                Ok(Received::Refused(error)) => format!("refused: {error}"),
                Err(status) => format!("{:?}: {}", status.code(), status.message()),
            });
        }
        assert_eq!(budget.in_flight(), 0);
        seen
    }

    #[tokio::test]
    async fn messages_are_whole_however_they_come() {
        let bytes = [framed(b"one"), super::framed(b""), super::framed(b"three"), super::framed(&[b'x'; 300])].concat();
        for piece in [1, 2, 5, 7, 300, 1000] {
            let seen = read(bytes.clone(), piece, &ByteBudget::unbounded(), None).await;
            assert_eq!(seen[..3], ["b\"one\"", "b\"\"", "b\"three\""], "pieces of {piece}");
            assert_eq!(seen.len(), 4);
            let cut = read(bytes[..bytes.len() - 1].to_vec(), piece, &ByteBudget::unbounded(), None).await;
            assert_eq!(cut[3], "Internal: the call ended in the middle of a message");
        }
        let wrong = |bytes: &[u8]| {
            let bytes = bytes.to_vec();
            async move { read(bytes, 3, &ByteBudget::unbounded(), None).await }
        };
        assert_eq!(wrong(&[2, 0, 0, 0, 0]).await, ["Internal: a message begins with the flag 2; expected 0 or 1"]);
        assert!(wrong(&[1, 0, 0, 0, 0]).await[0].starts_with("Internal: a compressed message"));
        assert!(wrong(&[0, 0, 0, 4, 0]).await[0].contains("the limit is 1000 bytes"));
    }

    #[tokio::test]
    async fn a_message_without_room_is_refused_and_the_next_is_read() {
        let bytes = [framed(b"one"), super::framed(&[b'x'; 300]), super::framed(b"three")].concat();
        for piece in [1, 8, 100, 1000] {
            let seen = read(bytes.clone(), piece, &ByteBudget::new(100), None).await;
            assert_eq!((seen.len(), seen[0].as_str(), seen[2].as_str()), (3, "b\"one\"", "b\"three\""), "{seen:?}");
            assert!(seen[1].starts_with("refused: ") && seen[1].contains("--max-in-flight-bytes"), "{seen:?}");
        }
    }

    #[tokio::test]
    async fn half_a_message_for_a_model_that_is_not_there_is_refused() {
        let doorkeeper: Doorkeeper = Arc::new(|name| match name {
            "there" => Ok(()),
            _ => Err(ServiceError::NotFound(format!("no '{name}'"))),
        });
        let to = |model: &str| {
            let message = ModelInferRequest { model_name: model.to_owned(), id: "x".repeat(300), ..Default::default() };
            framed(&message.encode_to_vec())
        };
        let mut bytes = [to("there"), to("nowhere"), to("there"), to("nowhere")].concat();
        bytes.truncate(bytes.len() - 100);
        let seen = read(bytes, 50, &ByteBudget::unbounded(), Some(doorkeeper)).await;
        assert_eq!(
            (seen.len(), seen[1].as_str(), seen[3].as_str()),
            (4, "refused: no 'nowhere'", "refused: no 'nowhere'")
        );
    }
}
