//! Sends the answers to inferences. A large tensor is not copied into its message: its bytes are
//! sent right after the part that announces them.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{BufMut, Bytes, BytesMut};
use downbeat_protocol::inference::{ModelInferResponse, ModelStreamInferResponse};
use downbeat_service::budget::ByteBudget;
use downbeat_service::client::Client;
use downbeat_service::work::offload;
use futures_core::Stream;
use http::{HeaderMap, HeaderName, HeaderValue, Response, header};
use http_body::{Body, Frame};
use prost::Message as _;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};
use tonic::Status;

use super::message::{self, PREFIX};
use crate::compression::Coding;

/// Tensors below this size are copied, so that a small answer is one piece.
const COPIED_BELOW: usize = 16 << 10;
/// The codings that a client takes.
const ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
/// `ModelInferResponse.raw_output_contents`.
const RAW_OUTPUT_CONTENTS: u32 = 6;
/// `ModelStreamInferResponse.infer_response`.
const INFER_RESPONSE: u32 = 2;

/// A message on the wire, in pieces.
pub(super) type Pieces = Vec<Bytes>;

/// The coding of answers: the coding of the client's messages, if the client accepts it. Most
/// clients only announce that they *accept* gzip. For them, compressing would take longer than the
/// model.
pub(super) fn coding_of_answers(headers: &HeaderMap, coding: Option<Coding>) -> Option<Coding> {
    let accepted = headers.get(&ACCEPT_ENCODING)?.to_str().ok()?;
    coding.filter(|coding| accepted.split(',').any(|name| name.trim() == coding.name()))
}

/// Writes an answer as a message of a call, or of a stream.
///
/// # Errors
/// If it is larger than a message can be.
pub(super) async fn pieces(
    client: Client,
    mut answer: ModelInferResponse,
    in_stream: bool,
    coding: Option<Coding>,
    budget: &Arc<ByteBudget>,
) -> Result<Pieces, Status> {
    let raw = std::mem::take(&mut answer.raw_output_contents);
    let raw_len =
        |tensor: &Bytes| key_len(RAW_OUTPUT_CONTENTS) + encoded_len_varint(tensor.len() as u64) + tensor.len();
    let inner = answer.encoded_len() + raw.iter().map(raw_len).sum::<usize>();
    let outer = if in_stream { key_len(INFER_RESPONSE) + encoded_len_varint(inner as u64) } else { 0 };
    let length = prefix(outer + inner)?;

    let copied: usize = raw.iter().map(Bytes::len).filter(|len| *len < COPIED_BELOW).sum();
    let mut small = BytesMut::with_capacity(PREFIX + outer + answer.encoded_len() + copied + 16 * raw.len());
    small.put_u8(0);
    small.put_slice(&length);
    if in_stream {
        encode_key(INFER_RESPONSE, WireType::LengthDelimited, &mut small);
        encode_varint(inner as u64, &mut small);
    }
    answer.encode_raw(&mut small);
    let mut pieces = Vec::with_capacity(1 + 2 * raw.len());
    for tensor in raw {
        encode_key(RAW_OUTPUT_CONTENTS, WireType::LengthDelimited, &mut small);
        encode_varint(tensor.len() as u64, &mut small);
        if tensor.len() < COPIED_BELOW {
            small.put_slice(&tensor);
        } else {
            pieces.push(small.split().freeze());
            pieces.push(budget.reservation().hold(tensor));
        }
    }
    if !small.is_empty() {
        pieces.push(small.freeze());
    }
    match coding {
        Some(coding) => compressed(client, pieces, coding).await,
        None => Ok(pieces),
    }
}

/// Writes an error as a message of a stream. The id tells the client which request it was.
pub(super) fn error_pieces(message: String, model_name: String, id: String) -> Result<Pieces, Status> {
    stream_error_pieces(message, ModelInferResponse { model_name, id, ..Default::default() })
}

/// Writes an error as a message of a stream, with an answer that tells which request it was.
pub(super) fn stream_error_pieces(message: String, about: ModelInferResponse) -> Result<Pieces, Status> {
    let answer = ModelStreamInferResponse { error_message: message, infer_response: Some(about) };
    let mut bytes = BytesMut::with_capacity(PREFIX + answer.encoded_len());
    bytes.put_u8(0);
    bytes.put_slice(&prefix(answer.encoded_len())?);
    answer.encode_raw(&mut bytes);
    Ok(vec![bytes.freeze()])
}

/// The length of a message as it is written before it.
fn prefix(length: usize) -> Result<[u8; 4], Status> {
    u32::try_from(length).map(u32::to_be_bytes).map_err(|_| {
        Status::resource_exhausted(format!(
            "the answer has {length} bytes, and a gRPC message holds 4 GiB; ask for fewer outputs at once"
        ))
    })
}

async fn compressed(client: Client, pieces: Pieces, coding: Coding) -> Result<Pieces, Status> {
    let length = pieces.iter().map(Bytes::len).sum::<usize>();
    offload::run_if(length >= offload::PARSE_FROM, client, length, move || {
        let whole = pieces.concat();
        let deflated = coding
            .deflate(whole.get(PREFIX..).unwrap_or_default())
            .map_err(|error| Status::internal(format!("the answer could not be compressed: {error}")))?;
        let length = prefix(deflated.len())?;
        Ok(vec![Bytes::from([&[1][..], &length].concat()), deflated])
    })
    .await?
}

/// The head of an answer with messages in `coding`.
pub(super) fn response(coding: Option<Coding>, body: tonic::body::Body) -> Response<tonic::body::Body> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    if let Some(coding) = coding {
        headers.insert(message::ENCODING, HeaderValue::from_static(coding.name()));
    }
    response
}

/// Messages, then the status of the call.
pub(super) struct AnswerBody<T> {
    pieces: VecDeque<Bytes>,
    more: Option<T>,
    ended: bool,
}

impl AnswerBody<futures_util::stream::Empty<Result<Pieces, Status>>> {
    /// A body of a single message.
    pub fn one(pieces: Pieces) -> Self {
        AnswerBody { pieces: pieces.into(), more: None, ended: false }
    }
}

impl<T> AnswerBody<T> {
    /// Messages as they come.
    pub fn many(messages: T) -> Self {
        AnswerBody { pieces: VecDeque::new(), more: Some(messages), ended: false }
    }
}

impl<T: Stream<Item = Result<Pieces, Status>> + Unpin> Body for AnswerBody<T> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        loop {
            if let Some(piece) = this.pieces.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            if this.ended {
                return Poll::Ready(None);
            }
            let next = match &mut this.more {
                Some(more) => ready!(Pin::new(more).poll_next(cx)),
                None => None,
            };
            let status = match next {
                Some(Ok(pieces)) => {
                    this.pieces.extend(pieces);
                    continue;
                }
                Some(Err(status)) => status,
                None => Status::ok(""),
            };
            this.ended = true;
            this.more = None;
            let mut trailers = HeaderMap::new();
            // A message that cannot be a header is left out; the code is always sent.
            let _ = status.add_header(&mut trailers);
            return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended && self.pieces.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use downbeat_protocol::inference::model_infer_response::InferOutputTensor;

    use super::*;

    fn answer(sizes: &[usize]) -> ModelInferResponse {
        let tensor =
            |(i, size): (usize, &usize)| (InferOutputTensor { name: format!("y{i}"), ..Default::default() }, *size);
        let (outputs, sizes): (Vec<_>, Vec<_>) = sizes.iter().enumerate().map(tensor).unzip();
        ModelInferResponse {
            model_name: "m".to_owned(),
            id: "7".to_owned(),
            outputs,
            raw_output_contents: sizes.into_iter().map(|size| vec![size as u8; size].into()).collect(),
            ..Default::default()
        }
    }

    #[tokio::test]
    async fn an_answer_in_pieces_is_the_message() {
        let budget = ByteBudget::unbounded();
        for sizes in [&[][..], &[0], &[3, 70_000, 0, 5, 100_000, 1], &[20_000; 3]] {
            let message = answer(sizes);
            let wire = pieces(Client::HERE, message.clone(), false, None, &budget).await.unwrap();
            let copied = wire.iter().filter(|piece| piece.len() >= COPIED_BELOW).count();
            assert_eq!(copied, sizes.iter().filter(|size| **size >= COPIED_BELOW).count());
            assert_eq!(budget.in_flight(), sizes.iter().filter(|size| **size >= COPIED_BELOW).sum::<usize>() as u64);
            let whole = wire.concat();
            assert_eq!(whole[1..5], (whole.len() as u32 - 5).to_be_bytes());
            assert_eq!(whole[5..], message.encode_to_vec());
            drop(wire);
            assert_eq!(budget.in_flight(), 0);

            let whole = pieces(Client::HERE, message.clone(), true, None, &budget).await.unwrap().concat();
            let streamed = ModelStreamInferResponse { error_message: String::new(), infer_response: Some(message) };
            assert_eq!(whole[5..], streamed.encode_to_vec());
            assert_eq!(whole[1..5], (whole.len() as u32 - 5).to_be_bytes());
        }
        let error = error_pieces("wrong".into(), "m".into(), "7".into()).unwrap().concat();
        let read = ModelStreamInferResponse::decode(&error[5..]).unwrap();
        assert_eq!((read.error_message.as_str(), read.infer_response.unwrap().id.as_str()), ("wrong", "7"));
    }
}
