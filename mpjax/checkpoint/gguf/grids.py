"""Types whose codes are points of a grid: IQ1, IQ2 and IQ3; and ternary types.

A code stands for eight values (IQ1, IQ2) or four (IQ3): their levels, if the file's grid has that
combination. Signs are stored apart, one for each value. In IQ2_XXS, IQ2_XS and IQ3_XXS, seven signs
determine the eighth: an even number is negative.

Source: ggml, src/ggml-common.h and src/ggml-quants.c. The points of a grid were chosen from
statistics of weights, so that no rule gives them. They are ordered by the number Σ levelₖ · baseᵏ,
where levels count from 0.
"""

from __future__ import annotations

import base64
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

# For each number, a bit: whether its point belongs to the grid; compressed.
_POINTS = {
    "IQ2_XXS": (
        "c-nPRORj`4470MbdWwiuj~R8vF<3s$DPNNQV8mEdDvh1mfzMz4@MsNM4-kL~Dg?0u3Z<Q}s#5&i%a^YL7=qILyw)"
        "W4Cso8iRnlpCLd`c4Du;C<RlH?aajd+e<FY7)k8>WSTt@47wX1jPqB41q=2e+&9hy;#r#nzQ(d`wV2I-N(E<X_7h"
        "ks$x7)Do8!;TEvZcdv+$;Bf*s-;99+U-&7)=?KnsoS&M%ZZjW8ztGaG<oin^)>q~!#84@<5Q?C;cAe-jqH$lW6s<"
        "jvF<nQc*Z$~yKl@H%B$)D{-`Y{-_v~Aze0c0{sHUUCpi"
    ),
    "IQ2_XS": (
        "c-mc2ORj`4470L|dWwh@;*?QWh*MOoP)|Aew9xme83;|{*iP^L>UVu^J$f&9<)%0;rYcZH@zkTcz*1-`0#F4vd)c"
        "qIa~EY0S(m36us~sl4e+uqnt+xnD5p1ifdk&k2^cqyDKl&hVwLuN#<u{Y#82-D2r2AS*#~B;6>b%zZ?$An2Qav5O"
        "yP;?IjC1*OUa>YNXBOJs!l*N%2M9ag1pZ#qbS<pDODX)Ys@FiGwcn?g7z}ZUJ85J?WuXe7)kq!xj_MC=sehbo`f6"
        "hw91-EjVApg;SBK(#S-ctqy5bslAAu_xaBeODLPcR%XL4jpOCvsj1dP@iIwgyVBr<uBI!nKMuUZZ1qQNNP<bV}FG"
        "N4KvRv{ky>(2~*Gt;x6q$P={6Cb#@3Dfxx_wWh`vWo0U*P"
    ),
    "IQ2_S": (
        "c-n1JOKt@r42!agI0c#&;*=39#3>LflvCCTO#7-9jpk=;Y=fB%TefG%OIlXuE_Fz<Ougf=%xu>+l3Bq8hyjg~lMr"
        "unmZ<Wy`~YGiEi#3On5vBd<vmKZSi%aW(psKWGWlAsphF>8rUC+;ZDfa(=s@_F#i0yss$-8fvv#Vf@jNV{kuiVLg"
        "A~66J1A2@4RVJKUxH}IH-$JpaZ^g})pmKjjd>lmojtPqGOJ!xqXVV(I)s3f1HneH&<4|id_Zsqi~d9|fZw$~1nHW"
        "O$bgs-@JBFei6qb36Asxo<#s4;BRhd~d<sfnbhG0<$t^)oE$@gK%zO1xyELVB%s1k`FAKZeJ@WjCtPZ6s4%XC=!C"
        "hZ<C{I5t%jB|RQ$q0^0H^%ZVVCdNfJ9HPfzZdmWSrg_I({bPgptf%^rJMcpz`hTS7u<>s9rVvW-WSa`T|j+oGk"
    ),
    "IQ3_XXS": (
        "c-l=-K?=h#3{ye}VW$qZd!FLL9+1HvWO^EVh1sdkoaHp#R7#szmgHo6m{j1}>~2z^o7e*jro|>W6f;suxGq5Thww"
        "rH-tdy3S=*8VCKknJ;ww~xN=C-Lt2kc1f`n?I#<sN&{qc;xi`rsIog^>xCi>0vO72GEj+P?`#G30*;dkafo0(MD7"
        "0~26E5oy)Fh-PS2J_iYxE!Gh>5A3e2Aw8l#Lz*UZ2xyz&!sE!Xy7=t?heopubnm$;UMyR4j1Wf!f;*xLWT6+u!rw"
        "*Hy!tqyDZ17JdzPtf@!~_J7yrh&WtZi"
    ),
    "IQ3_S": (
        "c-k#dK}rKb5Ud?m7(7iN59ovqtiR~U2pdlmS^v`sIn3TR;sZue5Z@6$Amj-`@D=vV+J}a&>aMEU{rNq)_mDQ1)6r"
        "Xa`g-zl6)-xV9&D<-%sLtw(&E+K!8jAZAn=FIh`{BX?s3iZ9eL!0y{saQwa{i<M_rV8i?Gza!ZNf5Tx$=B>&%}&x"
        "2aFnb2>I1DZfG3@eJJ?w}Hf9jj>U<u}qaX$V(Q{%bJZi0qBwX8+P2=0D&xpG^*kpx3aC_+^woo1gDy;frCMb5s>P"
        "fCelExhl@Z5=M_J&lZwQK<TIaOt1Nd_t_Z4Nkqr(Irw~QLK*sjOloy2EUU#sN3YKfvLC9pG+yhGG#kO><KBF1{I~"
        "{B$E!8AqIlE}-BNQAl`R33C|JNFjj93D(#a!oZudm_a(c~OHe<Yb)Y4R?AVbTWv01QA~hX"
    ),
    "IQ1_S": (
        "c-k#eO>0z16uqyx#k83y_qA0qE*kA7fk#%6iL;cd<W&+S(JE7AEBc6nlGQ*KX*Z#@1057+gows$6w-}Cbfte_m;o"
        "2UY|_#*VZa~*x^U%6T=`Mm&aUdhx#ygF&eKOplgaU0)cQ?aLaWb`!=%}lC@i-gZEZ5CFdhU_><`D{U2pdIZAiiRB"
        "Z^Tjpc--1mjt-&r-O_l7bZy)3*%3zRUeyRXfJ~s5?<5PM<UK4aB<I3L}>n{hnc{+>K$G67mn>zvR$=UOtZPa7LUs"
        "mQWQ2bN)ou!Kj_yfb~LQyR=nku)`P+=g=?+GNRyF#AueD^;Yg67k)HG=(os>Uh!rG~(gRxZza2HhyPsM)=qh9|eh"
        "XUldkU;_wA!C+2Fv`rcq!34!0Fqz%0;&7#XeAmBu`}t6ci#>+3WlSwzITy{$0C$RU8lhlWkibbyz6nxOL=l|4%yA"
        "AJ4G^LV^S*V!(*CwdNU%)Qrh$#q9cyW*tq|@QQ}j896#XTv`6q5lhc&*LLPVeEGcad$xT4&D*b^FV9bJ+^}ih*A`"
        "2jX2rIue$9q9{)`S!jt!g=X1D{vGEMnukjj}Wcvs!oqc~_d61@aP1V3Bvcjc9uWpgt6=l#-;vm1GpU-HX*>(|GJ!"
        "F2C{R9{8qA7trFiLFJ0VD+S2Ny_0+jiaiUvPbU!Gt<44HyL$nQ%A{iI)xZW(;0iU=zRoe)YSg8LFF!L&Ei&Q)Fng"
        "Sxd==b)ez8IIEAq?gCPR1z1`cE#svx$dBcgrdMr~`+vY{G*{j)LdH7J(;|V_S3+rEqj0{aUGZ~5`z3=#nUT2ypkI"
        "bf^7Qd%#dKF#22&cWI$B=(k{y*i-P-%7a6aqltG8tC11XWn$8wuQe)#`Rb$ezM@h+=MX6ehv4>@KW-1MD8)wE"
    ),
}
_LEVELS = {"IQ2": 3, "IQ3": 8, "IQ1": 3}
# Values by code, which a scale multiplies: the levels, with both signs, in ascending order.
_IQ2 = (1.0, 25 / 8, 43 / 8)
_IQ3_XXS = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.5)
_ODD = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0)


def signed(levels: tuple[float, ...]) -> tuple[float, ...]:
    """The levels with both signs, ascending, and the largest again up to a power of two."""
    found = (*(-level for level in reversed(levels)), *levels)
    return found + found[-1:] * (2 ** (len(found) - 1).bit_length() - len(found))


IQ2_TABLE, IQ3_XXS_TABLE, IQ3_S_TABLE = signed(_IQ2), signed(_IQ3_XXS), signed(_ODD)
IQ1_TABLE = signed((1 / 8, 7 / 8, 9 / 8))
TERNARY_TABLE = (-1.0, 0.0, 1.0, 2.0)


@functools.cache
def grid(name: str) -> np.ndarray:
    """The levels of a grid's points, int32 [points, 4 or 8]. name: of the type."""
    base = _LEVELS[name[:3]]
    values = 4 if base == 8 else 8
    bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b85decode(_POINTS[name])), np.uint8))
    numbers = np.flatnonzero(bits[: base**values])
    return (numbers[:, None] // base ** np.arange(values) % base).astype(np.int32)


def _bits(packed: jax.Array, count: int, width: int = 1) -> jax.Array:
    """Runs of `width` bits of each number, the lowest first: [..., n] to int32 [..., n, count]."""
    shifts = jnp.arange(0, count * width, width, dtype=jnp.uint32)
    packed = packed.astype(jnp.uint32)[..., None]
    shifted = packed >> jax.lax.broadcast_to_rank(shifts, packed.ndim)
    return (shifted & jnp.uint32(2**width - 1)).astype(jnp.int32)


def _words(blocks: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Bytes [..., n · size] as little-endian numbers [..., n]."""
    size = jnp.dtype(dtype).itemsize
    return jax.lax.bitcast_convert_type(blocks.reshape(*blocks.shape[:-1], -1, size), dtype)


def _with_parity(seven: jax.Array) -> jax.Array:
    """Eight signs from the lower seven bits: int32 [...] to [..., 8], of which 1 is negative."""
    found = _bits(seven, 7)
    return jnp.concatenate([found, found.sum(-1, keepdims=True) & 1], -1)


def _indices(points: jax.Array, signs: jax.Array, name: str) -> jax.Array:
    """Codes of a signed table, int32 [..., 256], of grid points [..., n] and signs.

    signs: [..., n, values of a point] or [..., 256]; 1 is negative.
    """
    levels = jnp.asarray(grid(name))[points]
    count = _LEVELS[name[:3]]
    levels = levels.reshape(*points.shape[:-1], -1)
    negative = signs.reshape(levels.shape)
    return jnp.where(negative == 1, count - 1 - levels, count + levels)


def _scale(blocks: jax.Array, begin: int = 0) -> jax.Array:
    """The float16 at byte `begin`, as float32 [..., 1]."""
    return _words(blocks[..., begin : begin + 2], jnp.float16).astype(jnp.float32)


def _odd(scale: jax.Array, steps: jax.Array) -> jax.Array:
    """The product scale · (1 + 2 · step), which all these types have."""
    return scale * (1 + 2 * steps.astype(jnp.float32))


def iq2_xxs(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes of IQ2_TABLE int32 [..., 256], and scales float32 [..., 8]."""
    words = _words(blocks[..., 2:], jnp.uint32).reshape(*blocks.shape[:-1], 8, 2)
    points = _bits(words[..., 0], 4, 8).reshape(*blocks.shape[:-1], 32)
    signs = _with_parity(_bits(words[..., 1], 4, 7))
    return _indices(points, signs, "IQ2_XXS"), _odd(_scale(blocks), words[..., 1] >> 28)


def iq2_xs(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes of IQ2_TABLE int32 [..., 256], and scales float32 [..., 16]."""
    words = _words(blocks[..., 2:66], jnp.uint16).astype(jnp.int32)
    codes = _indices(words & 511, _with_parity(words >> 9), "IQ2_XS")
    return codes, _odd(_scale(blocks), _nibbles(blocks[..., 66:]))


def iq2_s(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes of IQ2_TABLE int32 [..., 256], and scales float32 [..., 16]."""
    high = _bits(blocks[..., 66:74], 4, 2).reshape(*blocks.shape[:-1], 32)
    points = blocks[..., 2:34].astype(jnp.int32) | high << 8
    codes = _indices(points, _bits(blocks[..., 34:66], 8), "IQ2_S")
    return codes, _odd(_scale(blocks), _nibbles(blocks[..., 74:]))


def iq3_xxs(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes of IQ3_XXS_TABLE int32 [..., 256], and scales float32 [..., 8]."""
    words = _words(blocks[..., 66:], jnp.uint32)
    signs = _with_parity(_bits(words, 4, 7))
    codes = _indices(blocks[..., 2:66].astype(jnp.int32), signs, "IQ3_XXS")
    return codes, _odd(_scale(blocks), words >> 28)


def iq3_s(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes of IQ3_S_TABLE int32 [..., 256], and scales float32 [..., 8]."""
    high = _bits(blocks[..., 66:74], 8).reshape(*blocks.shape[:-1], 64)
    points = blocks[..., 2:66].astype(jnp.int32) | high << 8
    codes = _indices(points, _bits(blocks[..., 74:106], 8), "IQ3_S")
    return codes, _odd(_scale(blocks), _nibbles(blocks[..., 106:]))


def iq1_s(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes of IQ1_TABLE int32 [..., 256], and scales float32 [..., 8]."""
    words = _words(blocks[..., 34:], jnp.uint16).astype(jnp.int32)
    points = _bits(words, 4, 3).reshape(*blocks.shape[:-1], 32)
    points = blocks[..., 2:34].astype(jnp.int32) | points << 8
    codes = _shifted(points, words >> 15 & 1)
    return codes, _odd(_scale(blocks), words >> 12 & 7)


def iq1_m(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes of IQ1_TABLE int32 [..., 256], and scales float32 [..., 16].

    The float16 scale of a block is in the top bits of its four words of steps.
    """
    nibbles = _nibbles(blocks[..., 32:48])
    points = blocks[..., :32].astype(jnp.int32) | (nibbles & 7) << 8
    words = _words(blocks[..., 48:], jnp.uint16)
    tops = _bits(words, 4, 4)[..., 3]
    places = jax.lax.broadcast_to_rank(jnp.arange(0, 16, 4, dtype=jnp.int32), tops.ndim)
    whole = (tops << places).sum(-1, keepdims=True).astype(jnp.uint16)
    scale = jax.lax.bitcast_convert_type(whole, jnp.float16).astype(jnp.float32)
    steps = _bits(words, 4, 3).reshape(*blocks.shape[:-1], 16)
    return _shifted(points, nibbles >> 3), _odd(scale, steps)


def _shifted(points: jax.Array, negative: jax.Array) -> jax.Array:
    """Codes of IQ1_TABLE: levels −1, 0 and 1, plus 1/8, or minus it for each run of points."""
    levels = jnp.asarray(grid("IQ1_S"))[points].reshape(*negative.shape, -1)
    # −9/8, −7/8, −1/8, 1/8, 7/8 and 9/8 have the codes 0 to 5.
    down = jax.lax.broadcast_in_dim(negative, levels.shape, range(negative.ndim))
    codes = jnp.where(down == 1, levels * 2, levels * 2 + 1)
    return codes.reshape(*points.shape[:-1], -1)


def _nibbles(packed: jax.Array) -> jax.Array:
    """Both nibbles of each byte, the low one first: [..., n] to int32 [..., 2n]."""
    return _bits(packed, 2, 4).reshape(*packed.shape[:-1], -1)


def tq1_0(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes of TERNARY_TABLE int32 [..., 256], and scales float32 [..., 1].

    A byte holds five digits of base 3, as the fraction byte / 256: a digit is what 3 · fraction
    has before the point, and the rest is the next fraction. The last four bytes hold four digits.
    """

    def digits(packed: jax.Array, count: int) -> jax.Array:
        powers = jnp.array([3**i for i in range(count)], jnp.uint8)[:, None]
        packed = packed[..., None, :]
        rest = (packed * jax.lax.broadcast_to_rank(powers, packed.ndim)).astype(jnp.int32)
        return (rest * 3 >> 8).reshape(*packed.shape[:-2], -1)

    parts = [(0, 32, 5), (32, 48, 5), (48, 52, 4)]
    codes = [digits(blocks[..., begin:end], count) for begin, end, count in parts]
    return jnp.concatenate(codes, -1), _scale(blocks, 52)


def tq2_0(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes of TERNARY_TABLE int32 [..., 256], and scales float32 [..., 1]."""
    packed = blocks[..., :64].reshape(*blocks.shape[:-1], 2, 32)
    codes = jnp.moveaxis(_bits(packed, 4, 2), -1, -2)
    return codes.reshape(*blocks.shape[:-1], 256), _scale(blocks, 64)
